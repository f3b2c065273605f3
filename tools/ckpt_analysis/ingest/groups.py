"""Numbers the operations of the run: the operations of single ranks that belong together get one number."""

from __future__ import annotations

import polars as pl

from ..common.names import FILE, OPERATION


def with_group(operations: pl.DataFrame) -> pl.DataFrame:
    """Operations of one run, in their order, with `group`: numbered by cycle and by start of the first rank.

    The n-th save of a tag on each rank is one save of the run, and so for the n-th load; those that say of how many
    ranks they are apart from others.
    """
    # All attempts of a load belong together, whatever tag each rank ended with.
    tag = pl.when(pl.col("operation") == "save").then(pl.col("tag")).fill_null("")
    said = pl.format("{}/{}", tag, "said_ranks")  # null where nothing is said
    key = pl.coalesce(said, tag).cast(pl.Categorical).alias("key")
    # Each file belongs to one rank in one cycle. Nearly every save has a tag of its own, and so many groups of one row
    # are slow: ranks of one number for all three tell the n-th of equal ones by their order.
    parts = pl.col(FILE).cast(pl.UInt64) * (1 << 32) + pl.col("key").to_physical()
    alike = parts * len(OPERATION.categories) + pl.col("operation").to_physical()
    occurrence = (alike.rank("ordinal") - alike.rank("min")).alias("occurrence")
    group = ["cycle", "operation", "key", "occurrence"]
    operations = operations.with_columns(key).with_columns(occurrence)
    groups = (
        operations.group_by(group)
        .agg(pl.col("start_ns").min().alias("first_ns"))
        .sort("cycle", "first_ns", pl.col("operation", "key").cast(pl.String), "occurrence")
        .with_row_index("group")
        .drop("first_ns")
    )
    joined = operations.join(groups, on=group, how="left", maintain_order="left")
    return joined.drop("key", "occurrence")
