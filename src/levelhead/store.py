"""Save converted models and load them back, bit by bit; nothing is ever unpickled.

A folder holds ``levelhead.json`` (what was converted, and a checksum) beside the weights as
safetensors; a model of transformers is saved by its own ``save_pretrained``.
"""

import importlib
import json
from collections.abc import Collection, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from levelhead.convert import convert
from levelhead.shapes import require
from levelhead.sites.find import find_attention
from levelhead.sites.host import CHILD, LEFT_ALONE, SAVED, installed_in
from levelhead.sites.reading import Reader, made_by
from levelhead.store_checksum import checksum

SPEC = "levelhead.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
FORMAT = 1
"""Version of ``levelhead.json``; a newer one is refused."""


def save(
    model: nn.Module,
    folder: str | Path,
    *,
    readers: Sequence[Reader] = (),
    ignore: Collection[type[nn.Module]] = (),
) -> Path:
    """Save a converted model.

    A model of transformers goes through its ``save_pretrained``; ``levelhead.from_pretrained``
    loads the folder, and a plain ``from_pretrained`` of it fails. Any other model is saved as its
    state dict, for ``levelhead.load(folder, model)``.

    Args:
        model: A converted model.
        folder: Where; made if missing.
        readers: As for ``convert``.
        ignore: As for ``convert``.

    Returns:
        The folder.

    Raises:
        ValueError: Nothing in the model is converted.
        ImportError: safetensors is missing.
    """
    spec = conversion_spec(model, readers, ignore)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    state = _state(model)
    if _is_transformers(model):
        getattr(model, "save_pretrained")(folder)  # noqa: B009
    else:
        _safetensors().save_file(_without_copies(state), folder / WEIGHTS)
    spec |= {"num_tensors": len(state), "checksum": checksum(state)}
    (folder / SPEC).write_text(json.dumps(spec, indent=2) + "\n")
    return folder


def load(
    folder: str | Path,
    model: nn.Module | None = None,
    *,
    readers: Sequence[Reader] = (),
    ignore: Collection[type[nn.Module]] = (),
    **options: Any,
) -> nn.Module:
    """Load what ``save`` saved.

    Args:
        folder: Where it lies.
        model: A stock model of the same architecture, not converted, to be converted in place and
            filled; not needed for a model of transformers.
        readers: As for ``convert``.
        ignore: As for ``convert``.
        options: For a model of transformers, as for ``from_pretrained``.

    Returns:
        The model, equal bit by bit to the one that was saved.

    Raises:
        ValueError: No levelhead.json, one of a newer format, tensors that do not fit the model,
            or another checksum.
        ImportError: safetensors is missing.
    """
    folder = Path(folder)
    spec = read_spec(folder)
    if model is None:
        require(
            (folder / "config.json").exists(),
            "a model that is not of transformers must be built before its weights are loaded",
            f"a folder without config.json, saved from {spec.get('model')}",
            "levelhead.load(folder, model) with a stock model of the same architecture",
        )
        return from_pretrained(folder, **options)
    tensors = _read_weights(folder)
    rebuild(model, spec, readers, ignore)
    _fill(model, tensors)
    _verify(model, spec)
    return model


def from_pretrained(folder: str | Path, **options: Any) -> nn.Module:
    """Load a converted model of transformers from a folder.

    Also takes what the model's own ``save_pretrained`` or a ``Trainer`` wrote; only ``save``
    leaves a checksum, and where there is one it must hold.

    Args:
        folder: A local folder.
        options: ``device`` and ``dtype``, where the loaded model shall go.

    Returns:
        The model in evaluation mode, as transformers returns it.

    Raises:
        ValueError: The folder holds no converted model of transformers, tensors do not fit, or
            the checksum does not hold.
        ImportError: transformers or safetensors is missing.
    """
    folder, device, dtype = Path(folder), options.pop("device", None), options.pop("dtype", None)
    require(not options, "from_pretrained takes device and dtype", ", ".join(options))
    model = _build_stock(folder)
    spec = _config_spec(folder)
    rebuild(model, spec)
    names = _names_on_disk(model)
    own = {n: tensor for n, tensor in _read_weights(folder).items() if _is_ours(n)}
    _fill(model, {names.get(n, n): own[n] for n in own}, set(names.values()))
    if (folder / SPEC).exists():
        _verify(model, read_spec(folder))
    return model.to(device=device, dtype=dtype)


def conversion_spec(
    model: nn.Module, readers: Sequence[Reader] = (), ignore: Collection[type[nn.Module]] = ()
) -> dict[str, Any]:
    """Say what was converted, as plain data.

    Args:
        model: A converted model.
        readers: As for ``convert``.
        ignore: As for ``convert``.

    Returns:
        What ``levelhead.json`` holds, but for the checksum.

    Raises:
        ValueError: Nothing in the model is converted.
    """
    sites = find_attention(model, readers=readers, ignore=ignore)
    found = {site.layer_idx: installed_in(site.module) for site in sites}
    converted = {idx: one for idx, one in found.items() if one and not one.undo.get(LEFT_ALONE)}
    require(bool(converted), "save needs a converted model", f"a {type(model).__name__}")
    first = next(iter(converted.values()))
    return {
        "format": FORMAT,
        "levelhead": version("levelhead"),
        "torch": torch.__version__,
        "model": f"{type(model).__module__}.{type(model).__qualname__}",
        "variant": str(first.variant),
        "start": first.start,
        "layers": {str(idx): [one.factor, one.factor_on] for idx, one in converted.items()},
    }


def read_spec(folder: Path) -> dict[str, Any]:
    """Read ``levelhead.json``.

    Args:
        folder: Where it lies.

    Returns:
        Its content.

    Raises:
        ValueError: It is missing, no JSON object, or of a newer format.
    """
    path = folder / SPEC
    require(path.exists(), f"a saved model must hold {SPEC}", f"none in {folder}")
    spec = _checked(json.loads(path.read_text()), path)
    newest = spec.get("format")
    require(
        isinstance(newest, int) and newest <= FORMAT,
        f"{SPEC} must be of format {FORMAT} or older",
        f"format={newest!r}",
        "a newer levelhead",
    )
    return spec


def _checked(spec: Any, path: Path) -> dict[str, Any]:
    """A file from a stranger: believe its types only after a look."""
    is_spec = isinstance(spec, dict) and isinstance(spec.get("variant"), str)
    layers = spec.get("layers") if is_spec else None
    fits = isinstance(layers, dict) and all(
        key.isdecimal() and isinstance(value, list) and len(value) == 2  # noqa: PLR2004
        and isinstance(value[0], int | float) and value[1] in {"", "o", "v"}
        for key, value in layers.items()
    )  # fmt: skip
    require(
        is_spec and fits,
        "a conversion must be written as variant and layers",
        f"{str(spec)[:80]} in {path}",
    )
    return spec


def rebuild(
    model: nn.Module,
    spec: Mapping[str, Any],
    readers: Sequence[Reader] = (),
    ignore: Collection[type[nn.Module]] = (),
) -> None:
    """Convert a stock model as a saved one was, without touching its weights.

    Args:
        model: The stock model.
        spec: What was read.
        readers: As for ``convert``.
        ignore: As for ``convert``.
    """
    layers = {int(idx): factor for idx, factor in spec["layers"].items()}
    convert(model, spec["variant"], list(layers), start="paper", readers=readers, ignore=ignore)
    for site in find_attention(model, readers=readers, ignore=ignore):
        installed = installed_in(site.module)
        if installed is not None and site.layer_idx in layers:
            installed.factor, installed.factor_on = layers[site.layer_idx]
            installed.start = spec.get("start", "paper")


def _build_stock(folder: Path) -> nn.Module:
    """Let transformers build and fill the host as it was before conversion.

    Raises:
        ValueError: A class that is not of transformers, or tensors that do not fit.
    """
    import transformers

    config: Any = transformers.AutoConfig.from_pretrained(folder)
    spec = _config_spec(folder)
    config._attn_implementation = spec.get("host_implementation")
    for key in SAVED:
        vars(config).pop(key, None)
    name = (config.architectures or ["none"])[0]
    model_class = getattr(transformers, name, None)
    require(
        isinstance(model_class, type) and issubclass(model_class, nn.Module),
        "a converted model must be of a class of transformers itself",
        f"architectures={config.architectures}",
        "levelhead.load(folder, model) with a stock model",
    )
    host = {k: tensor for k, tensor in _read_weights(folder).items() if not _is_ours(k)}
    loader: Any = model_class
    model, info = loader.from_pretrained(
        None, config=config, state_dict=host, output_loading_info=True
    )
    wrong = {what: sorted(keys) for what, keys in info.items() if keys}
    require(not wrong, "a folder must hold every tensor of its model", f"{wrong}")
    return model


def _names_on_disk(model: nn.Module) -> dict[str, str]:
    """Return the variant's tensors by the names ``save_pretrained`` gives them: some
    architectures (ViT) are renamed on the way to the disk."""
    from transformers.core_model_loading import revert_weight_conversion

    host: Any = model
    ours = {name: tensor for name, tensor in model.state_dict().items() if _is_ours(name)}
    return {next(iter(revert_weight_conversion(host, {n: t}))): n for n, t in ours.items()}


def _config_spec(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    config = json.loads(path.read_text()) if path.exists() else {}
    require(
        "levelhead" in config,
        "from_pretrained needs a folder with a converted model of transformers",
        f"no entry 'levelhead' in {path}",
        "a folder written by levelhead.save, save_pretrained or a Trainer",
    )
    return _checked(config["levelhead"], path)


def _is_ours(name: str) -> bool:
    return CHILD in name.split(".")


def _is_transformers(model: nn.Module) -> bool:
    return made_by(model, "transformers") and hasattr(model, "save_pretrained")


def _state(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


def _without_copies(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tied weights are written once more, as safetensors knows no sharing."""
    return {name: tensor.clone().contiguous() for name, tensor in state.items()}


def _safetensors() -> Any:
    try:
        return importlib.import_module("safetensors.torch")
    except ImportError as error:
        raise ImportError(
            "saving and loading needs safetensors: pip install 'levelhead[transformers]'"
        ) from error


def _read_weights(folder: Path) -> dict[str, Tensor]:
    """Read one file of safetensors, or all that an index names."""
    files = [WEIGHTS]
    if (folder / INDEX).exists():
        index = json.loads((folder / INDEX).read_text())
        files = sorted(set(index["weight_map"].values()))
    tensors: dict[str, Tensor] = {}
    for name in files:
        path = folder / Path(name).name
        require(path.exists(), "weights must lie beside their description", f"no {path}")
        tensors |= _safetensors().load_file(path)
    return tensors


def _fill(model: nn.Module, tensors: Mapping[str, Tensor], wanted: set[str] | None = None) -> None:
    """Copy tensors into a model, all of them or none."""
    state = model.state_dict()
    wanted = set(state) if wanted is None else wanted
    missing, unknown = sorted(wanted - set(tensors)), sorted(set(tensors) - wanted)
    shapes = [
        f"{name} {list(tensors[name].shape)} for {list(state[name].shape)}"
        for name in sorted(wanted & set(tensors))
        if tensors[name].shape != state[name].shape or tensors[name].dtype != state[name].dtype
    ]
    require(
        not (missing or unknown or shapes),
        "saved tensors must be those of the model, in shape and dtype",
        f"missing {missing}, unknown {unknown}, different {shapes}",
    )
    model.load_state_dict(dict(tensors), strict=False)


def _verify(model: nn.Module, spec: Mapping[str, Any]) -> None:
    found = checksum(_state(model))
    require(
        found == spec.get("checksum"),
        "loaded tensors must be those that were saved, bit by bit",
        f"checksum {found[:16]}..., saved {str(spec.get('checksum'))[:16]}...",
    )
