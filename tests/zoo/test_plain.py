"""Plain models: nothing in them needs fp32 but what the op rules say, so all their products run low at O1."""

import pytest
import torch
from slice_models import HAND_WRITTEN, Built, hf, ids

import autoprec

PLAIN = {
    "bert": lambda: hf("BertForMaskedLM", ids()),
    "gpt2": lambda: hf("GPT2LMHeadModel", ids(), n_embd=32, n_layer=2, n_head=4, attn_implementation="eager"),
    "vit": lambda: hf("ViTModel", torch.randn(2, 3, 32, 32), image_size=32, patch_size=8),
    "resnet": HAND_WRITTEN["resnet"],
    "llama": lambda: hf("LlamaForCausalLM", ids(), num_key_value_heads=2, attn_implementation="eager"),
}


def built(name: str) -> Built:
    if name != "resnet":
        transformers = pytest.importorskip("transformers", reason="needs transformers: pip install 'autoprec[hf]'")
        try:
            _ = transformers.LlamaForCausalLM
        except (ImportError, RuntimeError) as error:  # a torchvision that doesn't fit torch
            pytest.skip(f"transformers' models can't be imported here: {error}")
    torch.manual_seed(0)
    return PLAIN[name]()


@pytest.mark.filterwarnings("default")  # of transformers itself
@pytest.mark.parametrize("target", ["a100", "v100"])
@pytest.mark.parametrize("name", PLAIN)
def test_all_products_run_low(name: str, target: str) -> None:
    model, args, kwargs = built(name)
    autoprec.convert(model, target, lambda m: m(*args, **kwargs))
    analysed = autoprec.receipt(model)
    assert analysed.low_precision_share >= 0.99
    assert not analysed.refused
    # the plan by rules alone, without having seen a number
    autoprec.convert(model, target)
    by_rules = autoprec.receipt(model, lambda m: m(*args, **kwargs))
    assert by_rules.low_precision_share >= 0.99
    assert not by_rules.refused


@pytest.mark.filterwarnings("default")
def test_a_model_of_any_size_is_planned_on_the_meta_device() -> None:
    """Shapes are enough for a plan: the same sites run low as where the model has weights."""
    model, _, kwargs = built("llama")
    # four dimensions are taken as they are; making a mask of fewer looks at values, which meta tensors lack
    length = kwargs["input_ids"].shape[1]
    kwargs["attention_mask"] = torch.full((length, length), torch.finfo(torch.float32).min).triu(1)[None, None]
    autoprec.convert(model, "a100", kwargs)
    here = {row.site: row.got for row in autoprec.receipt(model) if row.flops}
    autoprec.revert(model)
    autoprec.convert(model.to("meta"), "a100", {name: value.to("meta") for name, value in kwargs.items()})
    there = {row.site: row.got for row in autoprec.receipt(model) if row.flops}
    assert there == here
    assert "bf16" in here.values()
