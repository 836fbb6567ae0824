"""The optimiser of the small trainings is torch's AdamW, number for number, and loads less."""

import subprocess
import sys

import torch
from torch import nn

from levelhead.harness.optimizer import EagerAdamW

SETTINGS = {"lr": 0.03, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "fused": True}


def trained(kind):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 3))
    groups = [
        {"params": [p for p in model.parameters() if p.ndim == 2]},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = kind(groups, **SETTINGS)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for step in range(4):
        optimizer.zero_grad(set_to_none=True)
        model(torch.full((2, 5), 0.1 * (step + 1))).square().sum().backward()
        optimizer.step()
        schedule.step()
    return model, optimizer


def test_every_number_is_torchs():
    own, optimizer = trained(EagerAdamW)
    plain, expected = trained(torch.optim.AdamW)
    for one, two in zip(own.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, two)
        assert not one.grad_fn
        for name, value in expected.state[two].items():
            assert torch.equal(optimizer.state[one][name], value)
    states = optimizer.state_dict(), expected.state_dict()
    assert states[0]["param_groups"] == states[1]["param_groups"]


TRAIN = """
import sys
from levelhead.harness.config import Cell
from levelhead.harness.tasks import make_task, resolve_task
from levelhead.harness.train import train_cell
tiny = {"vit": {"embed_dim": 12, "num_heads": 2, "num_layers": 1}}
task = make_task(resolve_task("digits", tiny, steps=2, batch_size=8))
train_cell(task, Cell(task="digits", variant="quest", init="conditioned", seed=0))
slow = ("torch._dynamo", "torch.distributed.tensor", "sympy", "sklearn", "scipy.stats")
print([name for name in slow if name in sys.modules])
"""


def test_a_training_loads_nothing_that_takes_seconds():
    done = subprocess.run(
        [sys.executable, "-c", TRAIN], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
