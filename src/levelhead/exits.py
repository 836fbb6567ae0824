"""What a command's end means, and how an exception is told in one line.

0    done
1    found unhealthy, or failed
2    bad input, including files that cannot be read or written
130  stopped by Ctrl-C
"""

FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130
CLI_INSTALL = "pip install 'levelhead[cli]'"
EXTRAS = {
    "PIL": "timm", "accelerate": "train", "datasets": "train", "jinja2": "report",
    "pandas": "report", "safetensors": "transformers", "timm": "timm", "torchvision": "timm",
    "transformers": "transformers", "x_transformers": "bench",
}  # fmt: skip
"""What brings a module that the command line can do without."""


def explain(error: Exception) -> tuple[int, str]:
    """Put an exception into an exit code and one line that names the remedy.

    Args:
        error: What a command raised.

    Returns:
        Exit code and line.
    """
    if hasattr(error, "format_message"):  # of the command line: click's, or typer's own copy of it
        return BAD_INPUT, " ".join(error.format_message().split())  # pyright: ignore
    if isinstance(error, ModuleNotFoundError) and error.name:
        module = error.name.split(".")[0]
        extra = EXTRAS.get(module, "cli")
        return BAD_INPUT, f"{module} is not installed: pip install 'levelhead[{extra}]'"
    if isinstance(error, OSError) and error.strerror:
        where = f": {error.filename}" if error.filename else ""
        return BAD_INPUT, f"{error.strerror}{where}"
    if isinstance(error, (ValueError, OSError, ImportError)):
        return BAD_INPUT, _one_line(error)
    name = type(error).__name__
    return FAILED, f"failed: {name}: {_one_line(error)} (LEVELHEAD_DEBUG=1 shows where)"


def _one_line(error: Exception) -> str:
    if hasattr(error, "errors"):  # pydantic's list of what is wrong, each with its place
        problems = error.errors()  # pyright: ignore[reportAttributeAccessIssue]
        lines = [f"{'.'.join(map(str, p['loc']))}: {p['msg']}".lstrip(": ") for p in problems]
        return "; ".join(line.replace("Value error, ", "") for line in lines)
    return " ".join(str(error).split())
