"""What came of a self-check, as a table."""

from dataclasses import dataclass

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"


@dataclass(frozen=True)
class Check:
    """What one check found.

    Attributes:
        name: What was checked.
        status: "passed", "failed" or "skipped".
        detail: Figures, or the reason.
    """

    name: str
    status: str
    detail: str


def verdict(name: str, holds: bool, detail: str) -> Check:
    """Return a row that passed or failed.

    Args:
        name: What was checked.
        holds: Whether it passed.
        detail: Figures.
    """
    return Check(name, PASSED if holds else FAILED, detail)


@dataclass(frozen=True)
class Verification:
    """What the self-check found.

    Attributes:
        title: What was checked.
        checks: One row a check.
    """

    title: str
    checks: tuple[Check, ...]

    @property
    def failed(self) -> tuple[Check, ...]:
        """The checks that failed."""
        return tuple(check for check in self.checks if check.status == FAILED)

    def __str__(self) -> str:
        rows = [f"{check.name:10s} {check.status:8s} {check.detail}" for check in self.checks]
        return "\n".join([self.title, "", *rows])


class VerificationError(RuntimeError):
    """The self-check of a converted model failed.

    Attributes:
        verification: All that was found.
    """

    def __init__(self, verification: Verification):
        self.verification = verification
        names = ", ".join(check.name for check in verification.failed)
        super().__init__(f"the self-check failed ({names})\n{verification}")
