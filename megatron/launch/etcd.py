"""A client of etcd (https://etcd.io), of its HTTP gateway (/v3, etcd 3.4 or later), with the calls that a launch needs.

It needs no library. TLS and etcd's authentication are not supported, as the connections of a launch have neither.
"""

from __future__ import annotations

import base64
import json
import re
from dataclasses import dataclass
from typing import Any

SCHEME = "etcd://"
_PREFIX = "restart-launch"  # of all keys, since etcd may have other users
_DEFAULT_PORT = 2379
_TIMEOUT_S = 1.0  # for an endpoint to answer
_ROUNDS = 3  # in which one is asked that has not answered: it, or this host, may have stood still
_ENDPOINT = re.compile(r"(?:\[(?P<ipv6>[\w:.%]+)\]|(?P<host>[^\s:@\[\]]+))(?::(?P<port>[0-9]{1,5}))?", re.ASCII)


class MembershipError(OSError):
    """etcd cannot be reached, or its answer is an error."""


@dataclass(frozen=True)
class StoreAddress:
    """The (host, port) of each etcd endpoint, and the name of the launch, which its keys begin with."""

    endpoints: tuple[tuple[str, int], ...]
    name: str

    def __str__(self) -> str:
        return SCHEME + ",".join(host_port(host, port) for host, port in self.endpoints) + "/" + self.name


def host_port(host: str, port: int) -> str:
    """HOST:PORT, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parse_address(text: str) -> StoreAddress:
    """Parse etcd://HOST[:PORT][,HOST[:PORT]...]/NAME. Raises ValueError."""
    hosts, _, name = text.removeprefix(SCHEME).partition("/")
    found = [_ENDPOINT.fullmatch(part) for part in hosts.split(",")]
    endpoints = [(one["ipv6"] or one["host"], int(one["port"] or _DEFAULT_PORT)) for one in found if one is not None]
    valid = len(endpoints) == len(found) and all(0 < port < 65536 for _, port in endpoints)
    if not text.startswith(SCHEME) or not valid or not name or "/" in name or name != name.strip():
        raise ValueError(
            "must be etcd://HOST:PORT[,HOST:PORT...]/NAME, as etcd://store1:2379,store2:2379/job42; NAME is the name "
            "of the launch, without /"
        )
    return StoreAddress(tuple(endpoints), name)


class Etcd:
    """The calls of etcd's API. Each raises MembershipError if no endpoint answers."""

    def __init__(self, address: StoreAddress) -> None:
        self._address = address
        self._endpoints = list(address.endpoints)

    def get(self, key: str) -> dict[str, Any] | None:
        """The value of a key, decoded from JSON; None if the key does not exist."""
        return self._value(self._call("kv/range", {"key": self._key(key)}))

    def grant(self, seconds: int) -> str:
        """The ID of a new lease."""
        return str(self._field(self._call("lease/grant", {"TTL": str(seconds)}), "ID"))

    def keep_alive(self, lease: str) -> bool:
        """Renew a lease; False if it has expired."""
        return "TTL" in self._field(self._call("lease/keepalive", {"ID": lease}), "result")

    def revoke(self, lease: str) -> None:
        """End a lease, and delete its keys."""
        self._call("lease/revoke", {"ID": lease})

    def create(self, key: str, value: dict[str, Any], lease: str) -> dict[str, Any]:
        """Create a key, which is deleted when `lease` ends, unless it exists. Returns its value then."""
        answer = self._call(
            "kv/txn",
            {
                "compare": [{"key": self._key(key), "target": "CREATE", "create_revision": "0", "result": "EQUAL"}],
                "success": [{"request_put": {"key": self._key(key), "value": _encoded(value), "lease": lease}}],
                "failure": [{"request_range": {"key": self._key(key)}}],
            },
        )
        if answer.get("succeeded"):
            return value
        existing = self._value(self._field(self._field(answer, "responses")[0], "response_range"))
        assert existing is not None  # in the same transaction
        return existing

    def change_while(self, key: str, value: dict[str, Any], changes: dict[str, dict[str, Any] | None]) -> bool:
        """Make all `changes` (key -> value; None deletes it) in a transaction if `key` has `value`; whether it had."""
        compare = {"key": self._key(key), "target": "VALUE", "value": _encoded(value), "result": "EQUAL"}
        success = [
            {"request_delete_range": {"key": self._key(name)}}
            if new is None
            else {"request_put": {"key": self._key(name), "value": _encoded(new)}}
            for name, new in changes.items()
        ]
        return bool(self._call("kv/txn", {"compare": [compare], "success": success}).get("succeeded"))

    def _key(self, name: str) -> str:
        return base64.b64encode(f"{_PREFIX}/{self._address.name}/{name}".encode()).decode()

    def _field(self, answer: dict[str, Any], name: str) -> Any:
        if name not in answer:
            raise MembershipError(f"{self._address}: unexpected answer {json.dumps(answer)[:200]}")
        return answer[name]

    def _value(self, found: dict[str, Any]) -> dict[str, Any] | None:
        pairs = found.get("kvs", [])
        return json.loads(base64.b64decode(pairs[0]["value"])) if pairs else None

    def _call(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Try the endpoints in turn, beginning with the one that answered last."""
        problems: dict[tuple[str, int], str] = {}
        asked = list(self._endpoints)
        for _ in range(_ROUNDS):
            silent = []
            for endpoint in asked:
                try:
                    answer = _post(endpoint, f"/v3/{path}", body)
                except OSError as error:
                    problems[endpoint] = f"{host_port(*endpoint)}: {error.strerror or error}"
                    silent += [endpoint] if isinstance(error, TimeoutError) else []
                    continue
                self._endpoints.remove(endpoint)
                self._endpoints.insert(0, endpoint)
                return answer
            asked = silent
        raise MembershipError(f"{self._address}: {'; '.join(problems.values())}")


def _post(endpoint: tuple[str, int], path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The answer to a request. Raises OSError, also if it is an error or none of etcd's."""
    import http.client  # imports ssl and email, which launches without etcd do not need

    connection = http.client.HTTPConnection(*endpoint, timeout=_TIMEOUT_S)
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        answer = json.loads(response.read())
    except TimeoutError:
        raise TimeoutError(f"no answer within {_TIMEOUT_S:g} s") from None
    except (http.client.HTTPException, ValueError):
        answer = None
    finally:
        connection.close()
    if not isinstance(answer, dict):
        raise OSError("it does not answer as etcd 3.4 or later does")
    error = answer.get("error")
    if response.status != http.client.OK or error is not None:
        raise OSError(f"etcd answers: {answer.get('message') or error or response.reason}")
    return answer


def _encoded(value: dict[str, Any]) -> str:
    return base64.b64encode(json.dumps(value, sort_keys=True).encode()).decode()
