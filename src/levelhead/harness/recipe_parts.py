"""What a recipe may say: the model, the data, the augmentation, the training, the evaluation.

Only plain values. Nothing here names a Python object, and what is not a field is an error.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from levelhead.harness.config import Count, Fraction, Positive, Precision, Schedule

NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Whole = Annotated[int, Field(ge=0)]
TimmName = Annotated[str, Field(pattern=r"^[a-z0-9_]+$")]
"""A bare name: no hub, no folder, no weights of its own."""


class Part(BaseModel):
    """Strict, frozen, and closed: an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class TimmOptions(Part):
    """What a timm model may be built with; None leaves timm's own value."""

    img_size: Count | None = None
    patch_size: Count | None = None
    in_chans: Count | None = None
    embed_dim: Count | None = None
    embed_dims: tuple[Count, ...] | None = None
    depth: Count | None = None
    depths: tuple[Count, ...] | None = None
    num_heads: Count | tuple[Count, ...] | None = None
    mlp_ratio: Positive | None = None
    window_size: Count | None = None
    drop_path_rate: Fraction | None = None
    drop_rate: Fraction | None = None


class TimmModel(Part):
    """A vision model of timm, built without trained weights."""

    kind: Literal["timm"]
    name: TimmName
    """As ``timm.list_models()`` has it."""
    options: TimmOptions = TimmOptions()
    """What differs from the model of that name."""
    num_params: Positive | None = None
    """Parameters that the built model must have, +-1 %."""
    weights: str | None = None
    """A .safetensors file to start from; a head of another size stays new."""


class ViTModel(Part):
    """levelhead's own small ViT; see ``ViTConfig``."""

    kind: Literal["vit"]
    patch_size: Count = 4
    embed_dim: Count = 48
    num_layers: Count = 2
    num_heads: Count = 4
    mlp_ratio: Positive = 2.0
    pooling: Literal["mean", "cls"] = "mean"
    positions: Literal["learned", "sinusoidal"] = "learned"
    norm: Literal["pre", "post"] = "pre"
    qkv_bias: bool = True
    dropout_p: Fraction = 0.0
    num_params: Positive | None = None
    """Parameters that the built model must have, +-1 %."""


class GPTModel(Part):
    """levelhead's own GPT, pre-LN or post-LN; see ``GPTConfig``."""

    kind: Literal["gpt"]
    vocab_size: Count = 256
    context_length: Count = 64
    embed_dim: Count = 64
    num_layers: Count = 2
    num_heads: Count = 4
    mlp_ratio: Positive = 4.0
    positions: Literal["learned", "sinusoidal", "rope"] = "learned"
    norm: Literal["pre", "post"] = "pre"
    dropout_p: Fraction = 0.0
    num_params: Positive | None = None
    """Parameters that the built model must have, +-1 %."""


class TransformersModel(Part):
    """A causal language model of transformers, built from its configuration."""

    kind: Literal["transformers"]
    family: Literal["gpt2", "llama", "qwen2"]
    """Which architecture."""
    vocab_size: Count
    context_length: Count
    """Tokens of a training window, and the longest sequence."""
    embed_dim: Count
    num_layers: Count
    num_heads: Count
    num_kv_heads: Count | None = None
    """None: as many as ``num_heads``; gpt2 has no other choice."""
    head_dim: Count | None = None
    """None: ``embed_dim / num_heads``; only llama has a choice."""
    mlp_dim: Count | None = None
    """None: four times ``embed_dim``."""
    rope_theta: Positive = 10_000.0
    """Base of the rotary positions of llama and qwen2."""
    dropout_p: Fraction = 0.0
    num_params: Positive | None = None
    """Parameters that the built model must have, +-1 %."""


class RetrievalModel(Part):
    """One layer, one head, no norms, no positions: the model of the retrieval task."""

    kind: Literal["retrieval"]
    embed_dim: Count = 16
    mlp_dim: Count = 32
    num_params: Positive | None = None
    """Parameters of one copy, +-1 %."""


Model = Annotated[
    TimmModel | ViTModel | GPTModel | TransformersModel | RetrievalModel,
    Field(discriminator="kind"),
]


class ImageFolder(Part):
    """Images in folders, one for each class, as ImageNet comes: ``path/train/CLASS/*.JPEG``."""

    kind: Literal["image_folder"]
    path: str
    train: str = "train"
    test: str = "val"
    num_classes: Count
    num_train: Count
    """Training images; a folder that holds another number is refused."""
    num_workers: Whole = 0


class Shards(Part):
    """webdataset tar shards: for each sample an image file and a ``.cls`` file with its label."""

    kind: Literal["shards"]
    train: str
    """Pattern of the training shards: ``/data/imagenet/train-{0000..1023}.tar`` or ``*``."""
    test: str
    num_classes: Count
    num_train: Count
    num_workers: Whole = 0


class TorchvisionData(Part):
    """A data set of torchvision that lies in ``path``; nothing is downloaded."""

    kind: Literal["torchvision"]
    name: Literal["cifar10", "cifar100", "oxford_pets", "flowers102", "food101"]
    path: str = "data"
    num_workers: Whole = 0


class BuiltinImages(Part):
    """Images as ``levelhead compare --data`` takes them."""

    kind: Literal["builtin_images"]
    name: str = "digits"
    """digits, fashion_mnist, or a folder with IDX files."""
    num_workers: Whole = 0


ImageData = ImageFolder | Shards | TorchvisionData | BuiltinImages


class DatasetsText(Part):
    """A text data set of the ``datasets`` library."""

    kind: Literal["datasets"]
    path: str
    """Its name on the hub, or a folder."""
    name: str | None = None
    """Its configuration."""
    train_split: str = "train"
    test_split: str | None = "validation"
    """None: the first ``held_out`` documents of the training split are the test data."""
    held_out: Whole = 0
    """Documents that are taken out of the training split."""
    text_column: str = "text"
    streaming: bool = False
    """Read while training instead of before it; resuming reads again what came before."""
    trust_remote_code: bool = False
    """Run code that the data set brings along; never without being asked for here."""
    tokenizer: str = "gpt2"
    """Name or folder of a tokenizer, or ``bytes``."""


class TextFiles(Part):
    """One's own text: .txt, .jsonl, .parquet or .arrow files."""

    kind: Literal["text_files"]
    train: str
    """Pattern of the training files: ``texts/train-*.parquet``."""
    test: str
    text_column: str = "text"
    streaming: bool = False
    """Read while training instead of before it; resuming reads again what came before."""
    tokenizer: str = "bytes"
    """Name or folder of a tokenizer, or ``bytes``."""


class BuiltinText(Part):
    """A text as ``levelhead compare --data`` takes it, read as bytes."""

    kind: Literal["builtin_text"]
    name: str = "topics"
    """topics, shakespeare, or a text file."""


TextData = DatasetsText | TextFiles | BuiltinText


class RetrievalData(Part):
    """Find the one token that is drawn from another law, and read its answer.

    Others' real part is N(0, I); the answer's is N(0, variance I), in half of the samples
    N(shift, .1 I) instead: a shortcut through the norm of the keys.
    """

    kind: Literal["retrieval"]
    num_tokens: Annotated[int, Field(ge=2)] = 8
    real_dim: Count = 16
    num_classes: Annotated[int, Field(ge=2)] = 10
    variance: Positive = 9.0
    shift_norm: Positive = 4.0
    """Length of the shift, whose direction the seed draws."""
    learning_rates: Annotated[tuple[Positive, ...], Field(min_length=1)]
    weight_decays: Annotated[tuple[NotNegative, ...], Field(min_length=1)]
    """Every pair of the two is a setting; all are trained side by side."""
    num_test: Count = 2048
    solved_at: Fraction = 0.9
    """Accuracy, on samples with and without the shortcut alike, that counts as solved."""


Data = Annotated[
    ImageData | TextData | RetrievalData,
    Field(discriminator="kind"),
]


class Augmentation(Part):
    """What is done to images; the training part is timm's."""

    image_size: Count
    """Height and width that the model gets."""
    num_channels: Literal[1, 3] = 3
    crop_frac: Fraction = 0.875
    """Share of the test image that its centre crop keeps."""
    interpolation: Literal["bilinear", "bicubic"] = "bicubic"
    random_crop: bool = True
    """Random resized crop and flip in training; False: the test transform."""
    min_area: Fraction = 0.08
    """Smallest share of the image that a random crop keeps."""
    randaugment: str | None = None
    """timm's words, such as ``rand-m9-mstd0.5-inc1``."""
    color_jitter: NotNegative = 0.0
    erasing: Fraction = 0.0
    """Probability of erasing a patch."""
    mixup: NotNegative = 0.0
    """Alpha of mixup; 0: none."""
    cutmix: NotNegative = 0.0
    """Alpha of CutMix; 0: none."""
    label_smoothing: Fraction = 0.0
    repeats: Count = 1
    """Copies of an image among the samples of an epoch (repeated augmentation)."""
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    """Subtracted from each channel; ImageNet's by default."""
    std: tuple[Positive, ...] = (0.229, 0.224, 0.225)

    @model_validator(mode="after")
    def _one_for_each_channel(self) -> "Augmentation":
        if not len(self.mean) == len(self.std) == self.num_channels:
            raise ValueError(
                f"mean and std must have num_channels={self.num_channels} numbers, got "
                f"{len(self.mean)} and {len(self.std)}"
            )
        if (self.randaugment or self.color_jitter or self.erasing) and not self.random_crop:
            raise ValueError("randaugment, color_jitter and erasing need random_crop")
        return self


class TrainingPlan(Part):
    """How it is trained."""

    epochs: Positive | None = None
    """Passes over the images; either this or ``steps``."""
    steps: Count | None = None
    """Optimiser steps; either this or ``epochs``."""
    batch_size: Count
    """Samples of a step over all devices: images, or windows of text."""
    micro_batch_size: Count | None = None
    """Most samples that one device takes at a time."""
    learning_rate: Positive
    """Peak; with ``learning_rate_batch`` that for a batch of so many samples."""
    learning_rate_batch: Count | None = None
    """The peak is scaled by ``batch_size / learning_rate_batch``."""
    min_learning_rate: NotNegative = 0.0
    schedule: Schedule = "cosine"
    warmup_epochs: NotNegative | None = None
    warmup_steps: Whole | None = None
    decay_steps: Whole = 0
    """Last steps, in which ``warmup_stable_decay`` falls."""
    weight_decay: NotNegative = 0.0
    layer_decay: Annotated[float, Field(gt=0, le=1)] | None = None
    """Each layer learns at this multiple of the next one's rate; timm models only."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    eps: Positive = 1e-8
    clip_norm: Positive | None = None
    ema_decay: Fraction | None = None
    mixed_precision: Precision = "no"
    evaluate_every: Count | None = None
    """Steps between evaluations."""

    @model_validator(mode="after")
    def _one_length(self) -> "TrainingPlan":
        if (self.epochs is None) == (self.steps is None):
            raise ValueError("either epochs or steps must be given, not both and not neither")
        if self.warmup_epochs is not None and self.warmup_steps is not None:
            raise ValueError("warmup_epochs and warmup_steps must not both be given")
        if self.warmup_epochs is not None and self.epochs is None:
            raise ValueError("warmup_epochs needs epochs; with steps give warmup_steps")
        return self


class Evaluation(Part):
    """What is measured on the test data."""

    max_samples: Count | None = None
    """Test images or windows, evenly spaced; None: all."""
    batch_size: Count = 256
    theta_rows: Whole = 0
    """Attention rows of each layer whose sensitivity theta is certified; 0: none."""
