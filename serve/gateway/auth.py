"""Who is asking. An API key names a tenant; without keys there is one tenant, and only this machine may ask."""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from starlette.requests import Request

from serve.gateway.errors import ApiError, not_found
from serve.gateway.settings import is_loopback

DEFAULT_TENANT = "default"


class Auth:
    """Keys, the admin token and the tenants' cache salts, read once at start."""

    def __init__(self, keys: Mapping[str, str] | None, secret: bytes, admin_token: str | None) -> None:
        """`keys` maps API keys to tenants; None means there are none and every request is the default tenant's."""
        # Looked up by digest, so that the time a look-up takes tells nothing about a key.
        self._tenants = None if keys is None else {_digest(key): tenant for key, tenant in keys.items()}
        self._secret = secret
        self._admin = None if admin_token is None else _digest(admin_token)

    @classmethod
    def read(cls, keys_file: Path | None, secret_file: Path, admin_token_file: Path | None) -> Auth:
        """Raises `ValueError` for a file that holds nothing usable, `OSError` for one that cannot be read."""
        secret = secret_file.read_bytes().strip()
        if len(secret) < 16:
            raise ValueError(f"{secret_file} holds {len(secret)} bytes; a secret has at least 16")
        token = None if admin_token_file is None else admin_token_file.read_text().strip()
        if token is not None and len(token) < 16:
            raise ValueError(f"{admin_token_file} holds {len(token)} characters; an admin token has at least 16")
        return cls(None if keys_file is None else read_keys(keys_file), secret, token)

    def tenant(self, request: Request) -> str:
        """The tenant of a request. Raises `ApiError` 401 or 403."""
        if self._tenants is None:
            _refuse_foreign_pages(request)
            return DEFAULT_TENANT
        key = _bearer(request)
        tenant = None if key is None else self._tenants.get(_digest(key))
        if tenant is None:
            raise ApiError(
                401, "Incorrect or missing API key: send 'Authorization: Bearer <key>'.", code="invalid_api_key"
            )
        return tenant

    def check_admin(self, request: Request) -> None:
        """Raises `ApiError` unless the request carries the admin token."""
        if self._admin is None:
            raise not_found("The internal API is off: no admin token is configured.")
        token = _bearer(request)
        if token is None or not hmac.compare_digest(_digest(token), self._admin):
            raise ApiError(401, "Incorrect or missing admin token.", code="invalid_admin_token")

    def cache_salt(self, tenant: str) -> str:
        """64 hex digits that separate a tenant's KV memory from every other's."""
        return hmac.new(self._secret, tenant.encode(), hashlib.sha256).hexdigest()

    def kv_owner(self, kind: Literal["session", "memory"], tenant: str, *ids: str) -> str:
        """64 hex digits that name on whose behalf KV is stored, and tell nothing of the ids. Memories are named
        together, in their order: what is stored for a combination is of each of them."""
        framed = json.dumps([kind, tenant, *ids]).encode()
        return hmac.new(self._secret, framed, hashlib.sha256).hexdigest()


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def _bearer(request: Request) -> str | None:
    scheme, _, value = request.headers.get("authorization", "").partition(" ")
    return value.strip() if scheme.lower() == "bearer" and value.strip() else None


def _refuse_foreign_pages(request: Request) -> None:
    """Without keys, a web page elsewhere must not reach this server through the user's browser."""
    host = urlsplit(f"//{request.headers.get('host', '')}").hostname or ""
    origin = request.headers.get("origin")
    foreign = origin is not None and not is_loopback(urlsplit(origin).hostname or "")
    if not is_loopback(host) or foreign:
        raise ApiError(
            403, "Without API keys this server answers only requests made to and from this machine.", code="not_local"
        )


def read_keys(file: Path) -> dict[str, str]:
    """Tenant by API key. Raises `ValueError` for a file that holds nothing usable, `OSError` for an unreadable one."""
    try:
        keys = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from error
    usable = isinstance(keys, dict) and keys and all(isinstance(name, str) and name for name in keys.values())
    if not usable:
        raise ValueError(f"{file} must hold a JSON object of API key to tenant name, with at least one entry")
    return {str(key): str(tenant) for key, tenant in keys.items()}
