"""Convert a model of the transformers library for inference, and see what each site got.

Run: python examples/convert_transformers_model.py
It builds a small Llama with random weights, so nothing is downloaded; with your own it is
AutoModelForCausalLM.from_pretrained(...) in the same place.
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import autoprec


def build_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


def main() -> None:
    model = build_model()
    batch = {"input_ids": torch.randint(1, 512, (2, 32))}
    with torch.no_grad():
        expected = model(**batch).logits

        # on an H100 the same line with target="h100"; "auto" is the device in this machine
        autoprec.convert(model, example_inputs=batch, mode="inference", formats="bf16")
        logits = model(**batch).logits
        tokens = model.generate(**batch, max_new_tokens=8, do_sample=False)

    receipt = autoprec.receipt(model)
    print(receipt)
    for row in receipt.rows[:8]:
        print(f"  {row.site}: asked {row.asked}, got {row.got}: {row.why}")
    error = (logits - expected).norm() / expected.norm()
    print(f"class {type(model).__name__}, logits in {logits.dtype}, relative error {error:.1e}")
    print(f"generated {tokens.shape[1] - 32} tokens for each of {tokens.shape[0]} prompts")

    autoprec.revert(model)
    with torch.no_grad():
        print("reverted exactly:", torch.equal(model(**batch).logits, expected))


if __name__ == "__main__":
    main()
