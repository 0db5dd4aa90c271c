"""The commands that only list what autoprec knows: formats and rules."""

import json

import pytest

RULES = '[[op]]\nnames = ["softmax"]\nkind = "low"\nwhy = "small model"\nsource = "own measurement"\n'


def test_formats_as_table_and_json(cli):
    table = cli("formats")
    assert "fp8_e4m3 " in table.stdout
    assert "448" in table.stdout
    rows = {row["name"]: row for row in json.loads(cli("formats", "--json").stdout)}
    assert rows["fp16"]["max"] == 65504
    assert rows["mxfp8"]["block_size"] == 32


def test_rules_list_has_all_tables(cli):
    rows = json.loads(cli("rules", "list", "--json").stdout)
    assert {row["table"] for row in rows} == {"op", "family", "scaler"}
    assert all(row["why"] for row in rows)


def test_rules_show_says_why(cli):
    result = cli("rules", "show", "softmax")
    assert result.stdout.startswith("softmax (op): fp32\n")
    assert "source  http" in result.stdout


def test_rules_show_of_an_unknown_name_fails(cli):
    result = cli("rules", "show", "softmx")
    assert result.exit_code == 2
    assert "softmx" in result.stderr


def test_a_users_rule_wins(cli, tmp_path):
    mine = tmp_path / "mine.toml"
    mine.write_text(RULES)
    assert cli("rules", "show", "softmax", "--rules", mine).stdout.startswith("softmax (op): low")
    rows = json.loads(cli("rules", "test", mine, "--json").stdout)
    assert [(row["name"], row["file"]) for row in rows] == [("softmax", "mine.toml")]


@pytest.mark.parametrize(
    "text", ["[[op]]\nnames = [", RULES.replace("softmax", "softmacks"), RULES.replace("low", "lower")]
)
def test_a_wrong_rule_file_is_an_error_that_names_it(cli, tmp_path, text):
    mine = tmp_path / "mine.toml"
    mine.write_text(text)
    result = cli("rules", "test", mine)
    assert result.exit_code == 2
    assert "mine.toml" in result.stderr
    assert "Traceback" not in result.stderr
