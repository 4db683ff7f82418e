"""The numbered LoRAs of Stability's code for Stage C, read for shared code (models/lora_files/numbered.py)."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from daguerre import plugins
from daguerre.families.cascade import lora_names, words
from daguerre.models.lora_files.numbered import Config, Rows
from daguerre.models.parts.text.encoder import TextEncoder


@dataclass(frozen=True)
class StageCLoras:
    """Reads them: layers by families/cascade/lora_names.py, words by families/cascade/words.py."""

    model: str = "Stage C of Stable Cascade"

    def config(self, path: Path) -> Config | None:
        return lora_names.config(path)

    def is_numbered(self, names: Iterable[str]) -> bool:
        return lora_names.is_numbered(names)

    def is_for(self, network: nn.Module) -> bool:
        return lora_names.is_one(network)

    def named(
        self, file: Path, tensors: Mapping[str, Tensor], component: str, network: nn.Module, said: Config | None
    ) -> dict[str, Tensor]:
        return lora_names.named(file, tensors, component, network, said)

    def words(self, path: Path, config: Config, reader: TextEncoder) -> tuple[Rows, Rows]:
        return words.read(path, config, reader)

    def reader(self, base: Path) -> TextEncoder:
        settings = plugins.find("families", "cascade_c").Settings(pretrained_model_name_or_path=str(base))
        return words.reader(settings)
