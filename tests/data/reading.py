"""The records that a data set chose, in the order of their source."""

from daguerre.data.dataset import Dataset
from daguerre.types import Record


def chosen_records(data: Dataset) -> list[Record]:
    """All records of the chosen samples of a set of few."""
    parts = [reads for _, reads in data.first(1000)]
    return [
        data.members[member].source.record(number)
        for reads in parts
        for member, number in zip(reads.members.tolist(), reads.numbers.tolist(), strict=True)
    ]
