"""AdamW without the door to the compiler, which takes two seconds to open in every process."""

import inspect

import torch


class EagerAdamW(torch.optim.AdamW):
    """torch's AdamW for steps that no compiler looks into: the same numbers.

    torch wraps three of its methods so that ``torch.compile`` leaves them alone, and the wrappers
    load the compiler at the first call. Here they are as they were before; a torch that wraps them
    in another way keeps its own.
    """

    add_param_group = inspect.unwrap(torch.optim.AdamW.add_param_group)
    zero_grad = inspect.unwrap(torch.optim.AdamW.zero_grad)
    step = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))
