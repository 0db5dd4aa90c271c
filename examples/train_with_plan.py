"""Apply a plan in a plain training loop.

Run: autoprec plan cnn -o plan.json        # by rules; `autoprec tune cnn` finds one by measurement
     python examples/train_with_plan.py plan.json
"""

import argparse
from itertools import islice
from pathlib import Path

import torch
from torch import nn

import autoprec
from autoprec.tasks import load_task


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("plan", help="a plan.json")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("-o", "--output", default="digits.pt")
    arguments = parser.parse_args()

    # your own model and data go here; these are the built-in CNN and its images of digits
    task = load_task("cnn")
    model = task.build_model(0)
    data = task.stream(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    # the two lines; the parameters stay the same objects, so that the optimizer above goes on with them
    plan = autoprec.load_plan(arguments.plan)
    autoprec.convert(model, plan=plan)

    # scales the loss where the plan has fp16 gradients, and does nothing otherwise
    scaler = plan.grad_scaler()
    for step, (images, labels) in enumerate(islice(data, arguments.steps)):
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if step % 10 == 0 or step == arguments.steps - 1:
            print(f"step {step}: loss {loss.item():.3f}")
    print(autoprec.receipt(model))

    # the keys are those of the plain model: the checkpoint loads with and without autoprec
    torch.save(model.state_dict(), arguments.output)
    plain = task.build_model(1)
    plain.load_state_dict(torch.load(arguments.output, weights_only=True))
    print(f"{Path(arguments.output).name} loads into the plain model")


if __name__ == "__main__":
    main()
