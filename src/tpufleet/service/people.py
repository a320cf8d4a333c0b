"""The routes about people: users, their tokens, and their secrets."""

from __future__ import annotations

from tpufleet.model.users import User
from tpufleet.model.views import (
    Done,
    MadeToken,
    NewToken,
    NewUser,
    SecretNames,
    SecretValue,
    TokenPage,
    UserPage,
)
from tpufleet.service import commands, queries
from tpufleet.service.routes import Call


def list_users(call: Call) -> UserPage:
    return UserPage(users=tuple(call.store.users()))


def put_user(call: Call) -> User:
    return commands.put_user(call.act, call.json(NewUser))


def drop_user(call: Call) -> Done:
    commands.drop_user(call.act, call.parts.shelves.secrets, call.path("name"))
    return Done()


def list_tokens(call: Call) -> TokenPage:
    return TokenPage(tokens=queries.tokens(call.store, call.user, call.text("user")))


def make_token(call: Call) -> MadeToken:
    return commands.make_token(call.act, call.json(NewToken))


def drop_token(call: Call) -> Done:
    commands.drop_token(call.act, call.path("id"))
    return Done()


def list_secrets(call: Call) -> SecretNames:
    secrets = call.parts.shelves.secrets
    return SecretNames(own=secrets.names(call.user.name), shared=secrets.names())


def put_secret(call: Call) -> Done:
    commands.put_secret(
        call.act, call.parts.shelves.secrets, call.path("name"), call.json(SecretValue)
    )
    return Done()


def drop_secret(call: Call) -> Done:
    shared = call.text("shared") is not None
    commands.drop_secret(call.act, call.parts.shelves.secrets, call.path("name"), shared=shared)
    return Done()
