"""Train a grid of variants side by side, paired, and say what the numbers show.

Every variant gets the same seeds, the same start of every parameter it shares with the others,
and the same batches in the same order. Finished trainings are kept and never done twice.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from levelhead.harness.config import (
    Cell,
    CompareSettings,
    Training,
    cells,
    default_workers,
    selection_cells,
)
from levelhead.harness.processes import RETRIES, Crew, Result
from levelhead.harness.runs import RunFolder
from levelhead.harness.selection import choices, chosen_rates, held_out
from levelhead.harness.spent import Spent
from levelhead.harness.step_times import keep, lacking, timed
from levelhead.harness.summary import summarise
from levelhead.harness.tasks import Task
from levelhead.harness.train import start_model
from levelhead.harness.workers import StepTiming, loaded_task, new_crew, train_all

TRAININGS = "trainings"  # folder of what the engine keeps of recipes' trainings

OnEvent = Callable[[str, int], None]


def compare(
    settings: CompareSettings,
    folder: Path,
    workers: int | None = None,
    on_event: OnEvent = lambda what, count: None,
    retries: int = RETRIES,
    crew: Crew | None = None,
) -> dict[str, Any]:
    """Train what is missing of a grid, time all variants, and sum up.

    With several learning rates the trainings that choose among them come first, then those that
    are reported, each row at its own choice.

    Args:
        settings: The grid.
        folder: Where everything is written; what it already holds is taken as done.
        workers: Processes that train side by side; as many as cores by default. With more than
            one, a script that calls this needs the usual ``if __name__ == "__main__":``.
        on_event: Told of progress: ``("total", steps)`` (anew when more is known), ``("steps",
            more)``, ``("cells", 1)``, ``("deaths", 1)``.
        retries: How often a training whose process died is begun again.
        crew: Processes of ``new_crew`` that may already run; None: started here when needed.

    Returns:
        The summary, as written to ``summary.json``.

    Raises:
        ValueError: Settings that do not fit the data, the models or the folder.
    """
    spent = Spent()
    tasks = {task.name: loaded_task(task) for task in settings.tasks}
    check_cells(tasks, settings)
    run = RunFolder(folder)
    with ExitStack() as stack:
        stack.enter_context(run.held())
        run.open_grid(settings.model_dump(mode="json"))
        spent.mark("checking")
        if crew is None:
            crew = stack.enter_context(new_crew())
        grid = _Grid(run, tasks, workers, on_event, retries, spent, crew)
        return _fill(grid, settings)


def _fill(grid: "_Grid", settings: CompareSettings) -> dict[str, Any]:
    selecting = selection_cells(settings)
    grid.train(selecting, then=cells(settings) if selecting else [])
    metrics = {name: task.metric for name, task in grid.tasks.items()}
    chosen = choices(settings, metrics, grid.records)
    reported = cells(settings, chosen_rates(settings, chosen))
    grid.train(reported, timing=settings.variants)
    grid.spent.mark("training")
    timings = timed(grid.run, grid.tasks, settings.variants)
    grid.spent.mark("timing")
    summed_up = summarise(grid.tasks, settings, grid.records, timings, chosen, grid.deaths)
    summary = {
        "folder": str(grid.run.path),
        "num_trained": len(grid.trained),
        "num_reused": len(selecting) + len(reported) - len(grid.trained) - len(grid.deaths),
        "num_unfinished": len(grid.deaths),
        "tasks": summed_up,
        "time": grid.spent.summed_up(),
    }
    grid.run.write_json("summary.json", summary)
    return summary


@dataclass
class _Grid:
    """What is done of a grid in one call."""

    run: RunFolder
    tasks: Mapping[str, Task]
    workers: int | None
    on_event: OnEvent
    retries: int
    spent: Spent
    crew: Crew
    trained: list[str] = field(default_factory=list)
    deaths: dict[str, tuple[str, ...]] = field(default_factory=dict)
    steps_done: int = 0

    def __post_init__(self) -> None:
        self.records = self._finished()

    def _finished(self) -> dict[str, dict[str, Any]]:
        return {Cell.from_record(record).key: record for record in self.run.finished()}

    def train(
        self, wanted: Sequence[Cell], then: Sequence[Cell] = (), timing: Sequence[str] = ()
    ) -> None:
        """Train those of some cells that no record holds.

        ``then`` says how many will follow. The steps of the variants in ``timing`` are timed by
        whoever is free first, while the last of the others still train.
        """
        trainings = self._missing(wanted)
        steps = sum(settings.steps for settings, _, _ in [*trainings, *self._missing(then)])
        self.on_event("total", self.steps_done + steps)
        if not trainings:
            return
        workers = default_workers(len(trainings)) if self.workers is None else self.workers
        workers = min(workers, len(trainings))
        self.spent.workers = max(self.spent.workers, workers)
        jobs = [*trainings, *self._timings(timing)]
        for result in train_all(jobs, workers, self._count, self.retries, self.crew):
            if isinstance(result.job, StepTiming):
                self._keep_times(result)
            else:
                self._keep(result)
        self.records = self._finished()

    def _timings(self, variants: Sequence[str]) -> list[StepTiming]:
        names = lacking(self.run, self.tasks, variants) if variants else []
        return [StepTiming(self.tasks[name].settings, tuple(variants)) for name in names]

    def _keep_times(self, result: Result) -> None:
        """Write down step times; those whose process died are measured in this one at the end."""
        if result.value is not None:
            keep(self.run, result.job.settings.name, result.value["times"])
            self.spent.add(result.value["clock_s"], result.start_s)

    def _missing(self, wanted: Sequence[Cell]) -> list[tuple[Training, Cell, Path]]:
        """The trainings that no record holds."""
        return [
            (self.tasks[cell.task].settings, cell, self.run.path / TRAININGS / cell.slug)
            for cell in wanted
            if cell.key not in self.records
        ]

    def _count(self, steps: int) -> None:
        self.steps_done += steps
        self.on_event("steps", steps)

    def _keep(self, result: Result) -> None:
        _, cell, _ = result.job
        died = {"deaths": list(result.deaths)} if result.deaths else {}
        self.on_event("deaths", len(result.deaths))
        if result.value is None:
            self.deaths[cell.key] = result.deaths
            self.run.append(cell.model_dump() | died, "deaths.jsonl")
            return
        self.run.append(result.value | died)
        self.trained.append(cell.key)
        self.spent.add(result.value["clock_s"], result.start_s)
        self.on_event("cells", 1)


def check_cells(tasks: Mapping[str, Task], settings: CompareSettings) -> None:
    """Build every model of the grid once, so that a bad one is found before any is trained.

    Args:
        tasks: Name to task.
        settings: The grid.

    Raises:
        ValueError: A variant or init that does not exist or does not fit a model, or data that
            cannot be split for choosing a learning rate.
    """
    for cell in cells(settings.model_copy(update={"seeds": 1})):
        start_model(tasks[cell.task], cell)
    if selection_cells(settings):
        for task in tasks.values():
            held_out(task)
