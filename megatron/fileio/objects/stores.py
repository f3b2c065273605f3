"""The kinds of object stores, by the scheme of their URIs. bucket.py has the client of each.

Imports the standard library only: the launch scripts read it, too.
"""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class ObjectStore:
    """What is to be known of a kind of object store besides its client.

    `form`: of its URIs, in texts for users. `name`: of the store where the environment names no server in one of the
    variables `endpoints`, of which the first that is set counts. `variables`: how the names of those begin that its
    client reads, and that ranks on other nodes get, too, but for `of_a_host`: what a cloud sets for one machine,
    container or function.
    """

    form: str
    name: str
    endpoints: tuple[str, ...]
    variables: tuple[str, ...]
    of_a_host: tuple[str, ...] = ()

    @property
    def endpoint(self) -> str | None:
        """The URL of the server that the environment names."""
        return next((os.environ[name] for name in self.endpoints if os.environ.get(name)), None)

    @property
    def in_words(self) -> str:
        """What is reported in place of a file system."""
        return self.name if self.endpoint is None else f"object storage at {self.endpoint}"

    def is_passed_on(self, variable: str) -> bool:
        """Whether ranks on other nodes get the variable of this name."""
        return variable.startswith(self.variables) and not variable.startswith(self.of_a_host)


STORES = {
    "s3": ObjectStore(
        "s3://BUCKET/PREFIX",
        "Amazon S3",
        endpoints=("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"),
        variables=("AWS_", "MEGATRON_OBJECT_STORE"),
        of_a_host=("AWS_CONTAINER_", "AWS_EXECUTION_ENV", "AWS_LAMBDA_"),
    )
}
"""By the scheme of their URIs."""
URI_FORM = " or ".join(store.form for store in STORES.values())  # in texts for users
