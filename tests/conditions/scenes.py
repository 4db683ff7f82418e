"""Images for the conditions, made from formulas: edges, shades and noise, in sizes that divide by nothing, too."""

import numpy as np

THRESHOLDS = ((100, 200), (30, 60), (0, 0), (10, 900))
SIGMAS = (0.5, 9.0)
SIZES = {"square": (64, 64), "odd": (37, 53)}


def scene(height: int, width: int, number: int = 0) -> np.ndarray:
    """[height, width, 3] uint8."""
    random = np.random.default_rng(number)
    y, x = np.mgrid[0:height, 0:width]
    shade = np.stack([x * 255 / width, y * 255 / height, 127 + 100 * np.sin((x + 2 * y) / 9)], axis=2)
    for _ in range(4):
        cy, cx, radius = random.uniform(0, 1, 3) * (height, width, min(height, width) / 3)
        inside = (y - cy) ** 2 + (x - cx) ** 2 < radius**2
        shade[inside] = random.uniform(0, 255, 3)
    shade[:, width // 3 : width // 3 + 2] = 20  # a dark line
    return (shade + random.normal(0, 3, shade.shape)).clip(0, 255).astype(np.uint8)


def scenes() -> dict[str, np.ndarray]:
    """By name."""
    found = {name: scene(*size, number) for number, (name, size) in enumerate(SIZES.items())}
    noise = np.random.default_rng(9).integers(0, 256, (40, 40, 3), dtype=np.uint8)
    return found | {"noise": noise, "flat": np.full((24, 24, 3), 90, np.uint8)}
