"""Images without transparency, where no setting names a colour for what is transparent."""

from PIL import Image


def on_white(image: Image.Image) -> Image.Image:
    """An RGB image: what is transparent is white, as training reads it unless `alpha_colour` says otherwise."""
    if image.mode == "RGB":
        return image
    whole = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", whole.size, "white"), whole).convert("RGB")
