"""timm's transforms as a recipe asks for them."""

from collections.abc import Callable
from typing import Any

from levelhead.harness.recipe_parts import Augmentation


def make_transform(augmentation: Augmentation, is_training: bool) -> Callable[[Any], Any]:
    """Return what turns an image into a normalised tensor.

    Args:
        augmentation: What the recipe says.
        is_training: Whether to do what is random.

    Returns:
        From a Pillow image to ``[C, image_size, image_size]`` float32.
    """
    from timm.data.transforms_factory import create_transform

    size = (augmentation.num_channels, augmentation.image_size, augmentation.image_size)
    make: Callable[..., Any] = create_transform
    common: dict[str, Any] = {
        "input_size": size,
        "interpolation": augmentation.interpolation,
        "mean": augmentation.mean,
        "std": augmentation.std,
    }
    if not (is_training and augmentation.random_crop):
        return make(**common, is_training=False, crop_pct=augmentation.crop_frac)
    return make(
        **common,
        is_training=True,
        scale=(augmentation.min_area, 1.0),
        auto_augment=augmentation.randaugment,
        color_jitter=augmentation.color_jitter,
        re_prob=augmentation.erasing,
        re_mode="pixel",
    )
