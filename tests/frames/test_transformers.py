"""Models of ``transformers``: generation, gradient checkpointing, saving, and outputs that are their own class."""

import copy

import pytest
import torch

import autoprec

transformers = pytest.importorskip("transformers")
try:
    from transformers import GPT2LMHeadModel, LlamaForCausalLM, T5ForConditionalGeneration
except (ImportError, RuntimeError) as error:  # a torchvision of another torch
    pytest.skip(f"transformers has no models here: {error}", allow_module_level=True)

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore::FutureWarning:transformers"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:transformers"),
]

SIZES = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 63}


def gpt2():
    config = transformers.GPT2Config(**SIZES, n_embd=32, n_layer=2, n_head=2, n_positions=64, resid_pdrop=0.0)
    config.embd_pdrop = config.attn_pdrop = 0.0
    return GPT2LMHeadModel(config)


def llama(attention="sdpa"):
    config = transformers.LlamaConfig(
        **SIZES,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation=attention,
    )
    return LlamaForCausalLM(config)


def eager_llama():
    return llama("eager")


def t5():
    config = transformers.T5Config(
        vocab_size=64,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    return T5ForConditionalGeneration(config)


def seeded(build):
    torch.manual_seed(0)
    return build()


def convert(model, **options):
    return autoprec.convert(model, target="a100", **options)


def close(got, want, tolerance=0.02):
    return (got - want).norm() < tolerance * want.norm()


IDS = torch.arange(2, 18).view(2, 8)


@pytest.mark.parametrize("build", [gpt2, llama, eager_llama, t5])
def test_forward_keeps_output_class_and_value(build, gemms):
    plain = seeded(build).eval()
    model = convert(copy.deepcopy(plain))
    inputs = {"input_ids": IDS, "labels": IDS}
    want, got = plain(**inputs), model(**inputs)
    assert type(got) is type(want)
    assert got.keys() == want.keys()
    assert got.logits.dtype == torch.float32
    assert close(got.logits, want.logits)
    with gemms() as seen:
        model(**inputs).loss.backward()
    low = [dtypes for _, dtypes in seen.seen if dtypes[0] == torch.bfloat16]
    assert len(low) > 0.8 * len(seen.seen)  # rotary tables are products of two numbers, and stay fp32


@pytest.mark.parametrize("build", [gpt2, llama])
@pytest.mark.parametrize(
    "options", [{}, {"num_beams": 2}, {"use_cache": False}, {"cache_implementation": "static"}], ids=str
)
def test_generation_gives_the_same_tokens(build, options):
    plain = seeded(build).eval()
    model = convert(copy.deepcopy(plain), mode="inference")
    arguments = {"max_new_tokens": 12, "do_sample": False, "disable_compile": True, **options}
    mask = torch.ones_like(IDS)
    want = plain.generate(IDS, attention_mask=mask, **arguments)
    assert torch.equal(model.generate(IDS, attention_mask=mask, **arguments), want)
    assert torch._C._len_torch_function_stack() == 0


def test_encoder_decoder_generates_the_same_tokens():
    plain = seeded(t5).eval()
    model = convert(copy.deepcopy(plain))
    assert torch.equal(model.generate(IDS, max_new_tokens=8), plain.generate(IDS, max_new_tokens=8))


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_changes_no_bit(reentrant):
    def gradients(checkpointing):
        model = convert(seeded(llama)).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
        return {name: p.grad for name, p in model.named_parameters()}

    want, got = gradients(False), gradients(True)
    for name, gradient in want.items():
        assert torch.equal(got[name], gradient), name


def test_saved_model_names_its_own_class(tmp_path):
    model = convert(seeded(llama))
    model.save_pretrained(tmp_path)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.architectures == ["LlamaForCausalLM"]
    for a, b in zip(loaded.parameters(), model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_resized_embeddings_stay_in_the_plan(gemms):
    model = convert(seeded(gpt2))
    model.resize_token_embeddings(80)
    with gemms() as seen:
        assert model(input_ids=IDS).logits.shape[-1] == 80
    assert seen.dtypes == {torch.bfloat16}


@pytest.mark.parametrize("build", [gpt2, llama])
def test_compiled_model_gives_the_same_bits(build):
    model = convert(seeded(build)).eval()
    with torch.no_grad():
        want = model(input_ids=IDS, use_cache=False).logits
        got = torch.compile(model, backend="eager")(input_ids=IDS, use_cache=False).logits
    assert torch.equal(got, want)
