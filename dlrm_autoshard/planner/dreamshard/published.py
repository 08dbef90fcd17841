"""Statistics that dlrm_datasets (github.com/facebookresearch/dlrm_datasets) publishes of its tables, by year.

published_of(num_tables=788).mean_reuse     # 12.7: for 2022's number of tables; else 2021's figures

From the locality_stats.txt beside its files, which count ids, distinct ids and how often each is used, over all tables
together. They have nothing on rows, dims or single tables.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Published:
    """reuse_shares: of the look-ups, those that go to ids in each of the 17 reuse bins. skew, log_head: not published;
    what made-up ids need so that a whole pool's reuse comes near (see `synthetic_pool`)."""

    year: int
    file: str
    num_tables: int
    batch_size: int
    num_ids: int
    num_unique: int
    reuse_shares: tuple[float, ...]
    skew: tuple[float, float]
    log_head: tuple[float, float] = (0, 4)

    @property
    def mean_reuse(self) -> float:
        return self.num_ids / self.num_unique

    @property
    def mean_pooling(self) -> float:
        """Mean over the tables."""
        return self.num_ids / self.batch_size / self.num_tables


PUBLISHED = {
    2021: Published(
        year=2021,
        file="fbgemm_t856_bs65536",
        num_tables=856,
        batch_size=65536,
        num_ids=887_017_990,
        num_unique=128_435_723,
        reuse_shares=(
            0.069, 0.044, 0.068, 0.101, 0.121, 0.104, 0.073, 0.058, 0.052,
            0.050, 0.049, 0.048, 0.048, 0.043, 0.031, 0.023, 0.019,
        ),
        skew=(0.7, 1.2),
    ),
    2022: Published(
        year=2022,
        file="fbgemm_t788_bs131072_0",
        num_tables=788,
        batch_size=131072,
        num_ids=1_405_163_864,
        num_unique=110_259_238,
        reuse_shares=(
            0.027, 0.023, 0.040, 0.068, 0.105, 0.120, 0.099, 0.070, 0.059,
            0.054, 0.040, 0.072, 0.064, 0.047, 0.021, 0.017, 0.076,
        ),
        skew=(0.9, 1.5),
    ),
}  # fmt: skip


def published_of(num_tables: int) -> Published:
    """Returns 2022's figures for its number of tables, else 2021's."""
    return PUBLISHED[2022 if num_tables == PUBLISHED[2022].num_tables else 2021]
