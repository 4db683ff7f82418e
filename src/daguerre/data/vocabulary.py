"""The texts of all captions that are trained on, for what is made of them before the first update."""

from contextlib import suppress

from daguerre.data import captions
from daguerre.data.dataset import open_datasets
from daguerre.data.images.headers import Undecodable
from daguerre.data.loading.collate import retrying
from daguerre.data.settings import DataSettings
from daguerre.errors import UserError

_AS_WRITTEN = {"shuffle_tags": False, "tag_dropout": 0.0, "wildcards": False}


def texts(settings: DataSettings) -> set[str]:
    """Every text that a caption of the training samples may be, each once; of a source whose settings say its words
    alone, these words. No image is decoded. UserError for a source that has neither a list of samples nor such words.
    """
    (dataset,) = open_datasets(settings, ["train"])
    found: set[str] = set()
    for (own, source, _), chosen in zip(dataset.members, dataset.selections, strict=True):
        if (known := own.words()) is not None:
            found |= known
            continue
        if chosen is None:
            raise UserError(
                f"the captions of the source `{own.source}` are made as they are needed, so their words cannot be "
                "listed: write the words themselves (model.words='[a, red, ...]')",
                code="unsupported",
                setting="model.words",
            )
        written = own.model_copy(update={"captions": own.captions.model_copy(update=_AS_WRITTEN)})
        for number in chosen.numbers[:].tolist():
            with suppress(Undecodable):
                found.update(captions.possible(retrying(source.record, number).texts, written))
    return found
