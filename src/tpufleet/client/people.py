"""Users, their tokens and their secrets: one method for each route."""

from __future__ import annotations

from tpufleet.client.routes import Routes, part
from tpufleet.model.users import Role, User
from tpufleet.model.views import (
    MadeToken,
    NewToken,
    NewUser,
    SecretNames,
    SecretValue,
    TokenPage,
    TokenRow,
    UserPage,
)


class People(Routes):
    def users(self) -> tuple[User, ...]:
        return self._get("/users", UserPage).users

    def put_user(self, name: str, role: Role) -> User:
        return self._transport.call("POST", "/users", User, body=NewUser(name=name, role=role))

    def drop_user(self, name: str) -> None:
        self._transport.call("DELETE", f"/users/{part(name)}")

    def tokens(self, user: str | None = None) -> tuple[TokenRow, ...]:
        return self._get("/tokens", TokenPage, user=user).tokens

    def make_token(self, user: str | None = None, note: str = "") -> MadeToken:
        body = NewToken(user=user, note=note)
        return self._transport.call("POST", "/tokens", MadeToken, body=body)

    def drop_token(self, token_id: str) -> None:
        self._transport.call("DELETE", f"/tokens/{part(token_id)}")

    def secrets(self) -> SecretNames:
        return self._get("/secrets", SecretNames)

    def put_secret(self, name: str, value: str, *, shared: bool = False) -> None:
        body = SecretValue(value=value, shared=shared)
        self._transport.call("PUT", f"/secrets/{part(name)}", body=body)

    def drop_secret(self, name: str, *, shared: bool = False) -> None:
        asked = {"shared": "true"} if shared else {}
        self._transport.call("DELETE", f"/secrets/{part(name)}", params=asked)
