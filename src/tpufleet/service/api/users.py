"""The routes about people: users, their tokens, and their secrets."""

from __future__ import annotations

from tpufleet.model.api_types import (
    Acknowledgement,
    CreatedToken,
    NewToken,
    NewUser,
    SecretNames,
    SecretValue,
    TokenPage,
    UserPage,
)
from tpufleet.model.users import User
from tpufleet.service import commands, queries
from tpufleet.service.routing import ApiCall


def list_users(call: ApiCall) -> UserPage:
    return UserPage(users=tuple(call.store.users()))


def put_user(call: ApiCall) -> User:
    return commands.put_user(call.context, call.parse_body(NewUser))


def delete_user(call: ApiCall) -> Acknowledgement:
    commands.delete_user(call.context, call.components.storage.secrets, call.path_param("name"))
    return Acknowledgement()


def list_tokens(call: ApiCall) -> TokenPage:
    return TokenPage(tokens=queries.token_rows(call.store, call.user, call.query_text("user")))


def create_token(call: ApiCall) -> CreatedToken:
    return commands.create_token(call.context, call.parse_body(NewToken))


def revoke_token(call: ApiCall) -> Acknowledgement:
    commands.revoke_token(call.context, call.path_param("id"))
    return Acknowledgement()


def list_secrets(call: ApiCall) -> SecretNames:
    secrets = call.components.storage.secrets
    return SecretNames(own=secrets.names(call.user.name), shared=secrets.names())


def put_secret(call: ApiCall) -> Acknowledgement:
    commands.put_secret(
        call.context,
        call.components.storage.secrets,
        call.path_param("name"),
        call.parse_body(SecretValue),
    )
    return Acknowledgement()


def delete_secret(call: ApiCall) -> Acknowledgement:
    shared = call.query_text("shared") is not None
    commands.delete_secret(
        call.context, call.components.storage.secrets, call.path_param("name"), shared=shared
    )
    return Acknowledgement()
