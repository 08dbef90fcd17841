"""Reads samples from a source and checks them before they are counted or trained on.

stretch = Stretch(source, "train", epoch=0, first=4096, last=5120)
batch = stretch.checked(stretch.read(), IdCheck(source.tables, "error"))
stretch.sample(7), stretch.place(7)     # "sample 4103 (from 0) of split 'train' ...", "row 3 of 'day_0.parquet'"
"""

from __future__ import annotations

from dataclasses import dataclass

from dlrm_autoshard.data.batch import Batch, DataSource, Split
from dlrm_autoshard.data.form_check import check_form
from dlrm_autoshard.data.id_check import IdCheck


@dataclass(frozen=True)
class Stretch:
    """A range of samples [first, last) of an epoch."""

    source: DataSource
    split: Split
    epoch: int
    first: int
    last: int

    def read(self) -> Batch:
        return self.source.read(self.split, self.epoch, self.first, self.last)

    def checked(self, batch: Batch, id_check: IdCheck) -> Batch:
        """Checks the batch's form, checks or repairs its ids, and cuts its sequences. DataError names sample and
        place."""
        named = f"data source '{type(self.source).__name__}', from {self.sample(0)},"
        check_form(batch, self.source, self.last - self.first, named)
        checked, cuts = id_check(batch, self.sample, self.place), getattr(self.source, "cuts", None)
        return checked if cuts is None else cuts(checked, self.source.tables)

    def sample(self, number: int) -> str:
        return f"sample {self.first + number} (from 0) of split '{self.split}' in epoch {self.epoch}"

    def place(self, number: int) -> str:
        """Returns where the sample is: in which file, if the source has a method `place(split, epoch, sample)`."""
        if hasattr(self.source, "place"):
            return str(self.source.place(self.split, self.epoch, self.first + number))
        return f"data source '{type(self.source).__name__}'"
