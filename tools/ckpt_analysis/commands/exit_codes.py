"""Exit statuses that all commands share."""

from __future__ import annotations

OK = 0
FINDINGS = 1  # under --strict or --fail-if: there is something to look at
COULD_NOT_RUN = 2  # wrong arguments, nothing that can be analysed, output that cannot be written

TEXT = "exit status: 0 fine, 1 findings (under --strict or --fail-if), 2 could not run."
