"""Users, their tokens and their secrets: one method for each route."""

from __future__ import annotations

from tpufleet.client.routes import Routes, path_segment
from tpufleet.model.api_types import (
    CreatedToken,
    NewToken,
    NewUser,
    SecretNames,
    SecretValue,
    TokenPage,
    TokenRow,
    UserPage,
)
from tpufleet.model.users import Role, User


class People(Routes):
    def users(self) -> tuple[User, ...]:
        return self._get("/users", UserPage).users

    def put_user(self, name: str, role: Role) -> User:
        return self._transport.call("POST", "/users", User, body=NewUser(name=name, role=role))

    def delete_user(self, name: str) -> None:
        self._transport.call("DELETE", f"/users/{path_segment(name)}")

    def tokens(self, user: str | None = None) -> tuple[TokenRow, ...]:
        return self._get("/tokens", TokenPage, user=user).tokens

    def create_token(self, user: str | None = None, note: str = "") -> CreatedToken:
        body = NewToken(user=user, note=note)
        return self._transport.call("POST", "/tokens", CreatedToken, body=body)

    def revoke_token(self, token_id: str) -> None:
        self._transport.call("DELETE", f"/tokens/{path_segment(token_id)}")

    def secrets(self) -> SecretNames:
        return self._get("/secrets", SecretNames)

    def put_secret(self, name: str, value: str, *, shared: bool = False) -> None:
        body = SecretValue(value=value, shared=shared)
        self._transport.call("PUT", f"/secrets/{path_segment(name)}", body=body)

    def delete_secret(self, name: str, *, shared: bool = False) -> None:
        asked = {"shared": "true"} if shared else {}
        self._transport.call("DELETE", f"/secrets/{path_segment(name)}", params=asked)
