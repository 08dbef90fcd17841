"""Cuts sequences to the lengths of `tables.sequences`, after their ids were checked.

batch = Cuts(config.tables.sequences)(batch, source.tables)
notes += said_of_cuts(source)            # "sequence 'clicks': 31 of the first 4,096 samples have more than 50 ids ..."
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from dlrm_autoshard.config import SequenceConfig
from dlrm_autoshard.data.batch import Batch, DataSource
from dlrm_autoshard.data.features import check_sequences
from dlrm_autoshard.data.form_check import check_form
from dlrm_autoshard.tables import TableConfig

_COUNTED = 4096


@dataclass(frozen=True)
class Cuts:
    """Cuts the sequences of these features."""

    of: Mapping[str, SequenceConfig]

    def __call__(self, batch: Batch, tables: Sequence[TableConfig]) -> Batch:
        """Returns the batch cut; unchanged if no sequence is too long. tables: the batch's features."""
        lengths_TB, kept = batch.lengths_TB.clone(), torch.ones(len(batch.values_N), dtype=torch.bool)
        for own, of_ids, table in zip(lengths_TB, kept.split(lengths_TB.sum(1).tolist()), tables, strict=True):
            asked = self.of.get(table.name)
            if asked is None or not bool((own > asked.max_length).any()):
                continue
            before_N = (own.cumsum(0) - own).repeat_interleave(own)
            place_N = torch.arange(len(of_ids)) - before_N
            if asked.keep == "newest":
                of_ids &= place_N >= (own - asked.max_length).repeat_interleave(own)
            else:
                of_ids &= place_N < asked.max_length
            own.clamp_(max=asked.max_length)
        if bool(kept.all()):
            return batch
        weights_N = None if batch.weights_N is None else batch.weights_N[kept]
        return replace(batch, lengths_TB=lengths_TB, values_N=batch.values_N[kept], weights_N=weights_N)


def with_cuts(source: Any, sequences: Mapping[str, SequenceConfig]) -> Any:
    """Attaches the cuts to the source, for the batch check to apply. DataError names a sequence that is no feature."""
    check_sequences([table.name for table in source.tables], sequences)
    if sequences:
        source.cuts = Cuts(sequences)
    return source


def said_of_cuts(source: DataSource) -> list[str]:
    """Returns sentences for a job's start on how many of the first samples' sequences are cut."""
    cuts: Cuts | None = getattr(source, "cuts", None)
    if cuts is None:
        return []
    count = min(_COUNTED, source.num_samples("train"))
    batch = source.read("train", 0, 0, count)
    check_form(batch, source, count, f"data source '{type(source).__name__}'")
    said = []
    for table, lengths_B in zip(source.tables, batch.lengths_TB, strict=True):
        asked = cuts.of.get(table.name)
        if asked is not None and (longer := int((lengths_B > asked.max_length).sum())):
            said.append(
                f"sequence '{table.name}': {longer:,} of the first {count:,} samples have more than {asked.max_length} "
                f"ids, up to {int(lengths_B.max()):,}; the {asked.keep} {asked.max_length} are kept."
            )
    return said
