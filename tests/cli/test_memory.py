"""``autoprec memory``: the quoted table, and what it leaves out."""

import json

import pytest


def schemes(result):
    assert result.exit_code == 0, result.stderr
    data = json.loads(result.stdout)
    assert data["kind"] == "estimated"
    return data, {row["name"]: row["total_bytes"] / 1e9 for row in data["schemes"]}


@pytest.mark.parametrize("params", ["70e9", "70B", "70000M"])
def test_the_quoted_table(cli, params):
    _, totals = schemes(cli("memory", "--params", params, "--json"))
    assert (totals["fp32"], totals["fp16"], totals["mixed"]) == (1120, 560, 840)


def test_what_it_leaves_out_is_said_with_numbers(cli):
    data, totals = schemes(cli("memory", "--params", "70e9", "--json"))
    left_out = {item["what"]: item["bytes"] for item in data["left_out"]}
    assert left_out["master parameters"] == 280e9
    assert left_out["activations"] is None
    assert totals["O2"] == totals["mixed"] + 280
    assert totals["O1, fp8"] == totals["fp32"]
    text = cli("memory", "--params", "70e9").stdout
    assert "master parameters (280 GB here)" in text
    assert "1120" in text
    assert "estimated" in text


def test_a_model_with_inputs_also_gets_its_step(cli, models):
    data, _ = schemes(cli("memory", f"{models}:factory", "--target", "h100", "--json"))
    assert data["num_params"] == 32 * 64 + 64 + 64 * 8 + 8
    assert list(data["beside"]) == ["peak of a step in fp32", "peak of a step by the plan for h100"]
    for estimate in data["beside"].values():
        assert estimate["kind"] == "estimated"
        assert estimate["value"] == pytest.approx(sum(estimate["parts"].values()))
        assert estimate["assumptions"]


def test_a_model_alone_gets_the_table(cli, models):
    data, _ = schemes(cli("memory", f"{models}:module", "--json"))
    assert data["beside"] == {}
    assert "activations" in cli("memory", f"{models}:module").stdout


def test_a_transformers_config(cli, tmp_path):
    try:
        from transformers import LlamaConfig, LlamaForCausalLM  # noqa: F401
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"needs transformers: {error}")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 100, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    data, _ = schemes(cli("memory", "--config", tmp_path, "--batch", "2", "--length", "32", "--json"))
    layer = 4 * 64 * 64 + 3 * 64 * 128 + 2 * 64
    assert data["num_params"] == 2 * layer + 64 + 2 * 100 * 64
    assert data["beside"]["activations of 2 x 32 tokens"]["parts"]["layers"] == 34 * 64 * 64 * 2


@pytest.mark.parametrize("arguments", [(), ("gpt", "--params", "1e9"), ("--params", "1e9", "--config", "x")])
def test_one_model_is_asked_for(cli, arguments):
    result = cli("memory", *arguments)
    assert result.exit_code == 2
    assert "give one of MODEL, --params NUMBER and --config PATH" in result.stderr


def test_a_config_that_is_not_there(cli):
    result = cli("memory", "--config", "nowhere")
    assert result.exit_code == 2
    assert "no such file or folder" in result.stderr
