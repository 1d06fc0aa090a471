"""Who may ask: with a token those who send it, without one the programs of this machine.

A page of another site can make a browser send requests here. Its name for this machine, its
`Origin` or `Sec-Fetch-Site` tells it: a server without a token answers only to names of this
machine, and no other site. See https://fetch.spec.whatwg.org/#origin-header and
https://www.w3.org/TR/fetch-metadata.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException

from protokv.errors import ConfigError

# Nobody else can reach, by these names, a server that listens on loopback.
_LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
# A host and perhaps a port, without any character that parsers of addresses read differently.
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[0-9a-z._-]+)(:[0-9]{1,5})?")
_ORIGIN = re.compile(r"https?://" + _HOST.pattern)
_TOKEN = re.compile(r"[!-~]+")


class AccessCheck:
    """Refuses who may not ask."""

    def __init__(self, token: str | None, origins: Sequence[str] = ()) -> None:
        """Remember what must be sent, None: nothing, and the other sites whose pages may ask.
        ConfigError if the token cannot be sent, or what is named is no site.
        """
        for origin in origins:
            if not _ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"{origin!r} is no origin of pages", hint="such as http://localhost:3000"
                )
        self._origins = origins
        if token is not None and not _TOKEN.fullmatch(token):
            raise ConfigError(
                "a token has at least one character, all of them visible ASCII",
                hint="such as 2fa86e1d",
            )
        self._token = None if token is None else token.encode()

    def check(self, headers: Headers) -> None:
        """Refuse a request by its headers. HTTPException, 401 or 403."""
        if self._token is None:
            self._check_site(headers)
            return
        # A proxy, given two such headers, may read the other one.
        given = headers.getlist("authorization")
        scheme, _, token = given[0].partition(" ") if len(given) == 1 else ("", "", "")
        if (
            not hmac.compare_digest(token.strip().encode(), self._token)
            or scheme.lower() != "bearer"
        ):
            raise HTTPException(
                401, "the token is missing or wrong", {"WWW-Authenticate": "Bearer"}
            )

    def _check_site(self, headers: Headers) -> None:
        host = headers.get("host", "").lower()
        named = _HOST.fullmatch(host)
        if named is None or named[1] not in _LOOPBACK:
            raise HTTPException(
                403, "this server is not known by that name; use a token, or localhost"
            )
        origin = headers.get("origin")
        if origin in self._origins:
            return
        if headers.get("sec-fetch-site", "none") not in ("none", "same-origin") or (
            origin is not None and origin.lower() != f"http://{host}"
        ):
            raise HTTPException(403, "pages of other sites may not ask; use a token")
