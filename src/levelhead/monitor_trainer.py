"""The monitor in transformers' ``Trainer``."""

from typing import Any

from levelhead.monitor import Monitor


def trainer_callback(monitor: Monitor) -> Any:
    """Return a ``TrainerCallback`` that watches while the trainer trains.

    The loss comes from the model's output, the gradient norm from the gradients at each measured
    step; steps end with the optimiser's.

    Args:
        monitor: Of the model the trainer gets; not entered yet.

    Returns:
        The callback, for ``Trainer(callbacks=[...])``.
    """
    from transformers import TrainerCallback

    class MonitorCallback(TrainerCallback):
        """Enters the monitor when training begins and leaves it when training ends."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            monitor.__enter__()

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            monitor.__exit__()

    return MonitorCallback()
