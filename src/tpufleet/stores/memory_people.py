"""The part of the store in memory that is about people: users, tokens, errands, small facts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from tpufleet.model.errands import HostCommandResult, SentHostCommand
from tpufleet.model.hosts import HostId
from tpufleet.model.users import Token, User

T = TypeVar("T")


class MemoryPeople:
    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._users: dict[str, User] = {}
        self._tokens: dict[str, Token] = {}
        self._facts: dict[str, str] = {}
        self._errands: dict[str, SentHostCommand] = {}
        self._errand_results: dict[str, dict[HostId, HostCommandResult]] = {}

    def _listed(self, values: Iterable[T], by: Callable[[T], object]) -> list[T]:
        with self._lock:
            return sorted(values, key=by)  # type: ignore[type-var, arg-type]

    # Errands.

    def put_host_command(self, sent: SentHostCommand) -> SentHostCommand:
        with self._lock:
            return self._errands.setdefault(sent.host_command.id, sent)

    def host_command(self, errand_id: str) -> SentHostCommand | None:
        return self._errands.get(errand_id)

    def host_commands(self) -> list[SentHostCommand]:
        return self._listed(self._errands.values(), lambda sent: (sent.sent_at, sent.host_command.id))

    def put_host_command_result(self, errand_id: str, result: HostCommandResult) -> None:
        with self._lock:
            self._errand_results.setdefault(errand_id, {}).setdefault(result.host_id, result)

    def host_command_results(self, errands: Sequence[str]) -> dict[str, list[HostCommandResult]]:
        with self._lock:
            found = {each: self._errand_results.get(each) for each in errands}
            return {
                each: [results[host] for host in sorted(results)]
                for each, results in found.items()
                if results
            }

    def delete_host_commands(self, errands: Sequence[str]) -> None:
        with self._lock:
            for each in errands:
                self._errands.pop(each, None)
                self._errand_results.pop(each, None)

    # People and facts.

    def put_user(self, user: User) -> None:
        with self._lock:
            self._users[user.name] = user

    def user(self, name: str) -> User | None:
        return self._users.get(name)

    def users(self) -> list[User]:
        return self._listed(self._users.values(), lambda user: user.name)

    def delete_user(self, name: str) -> None:
        with self._lock:
            self._users.pop(name, None)
            self._tokens = {key: each for key, each in self._tokens.items() if each.user != name}

    def put_token(self, token: Token) -> None:
        with self._lock:
            self._tokens[token.id] = token

    def token_by_hash(self, digest: str) -> Token | None:
        with self._lock:
            return next((each for each in self._tokens.values() if each.hash == digest), None)

    def tokens(self, user: str | None = None) -> list[Token]:
        with self._lock:
            found = [each for each in self._tokens.values() if user in (None, each.user)]
        return sorted(found, key=lambda token: (token.created_at, token.id))

    def refresh_token(self, token: Token) -> None:
        with self._lock:
            if token.id in self._tokens:
                self._tokens[token.id] = token

    def delete_token(self, token_id: str) -> None:
        with self._lock:
            self._tokens.pop(token_id, None)

    def metadata(self, name: str) -> str | None:
        return self._facts.get(name)

    def put_metadata(self, name: str, value: str) -> None:
        with self._lock:
            self._facts[name] = value
