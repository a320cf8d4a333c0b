"""The part of the store on SQL that is about people: users, tokens, errands, small facts."""

from __future__ import annotations

from collections.abc import Sequence

from tpufleet.model.errands import HostCommandResult, SentHostCommand
from tpufleet.model.users import Token, User
from tpufleet.stores import commits, rows
from tpufleet.stores.databases import Session
from tpufleet.stores.sql_tables import SqlTables


class SqlPeople(SqlTables):
    # Errands.

    def put_host_command(self, sent: SentHostCommand) -> SentHostCommand:
        def work(session: Session) -> SentHostCommand:
            session.run(
                "INSERT INTO errands (id, sent_at, data) VALUES (?, ?, ?) ON CONFLICT DO NOTHING",
                sent.host_command.id,
                rows.to_micros(sent.sent_at),
                rows.to_text(sent),
            )
            found = session.rows("SELECT data FROM errands WHERE id = ?", sent.host_command.id)
            return rows.decode_all(found, SentHostCommand)[0]

        return self._database.write(work)

    def host_command(self, errand_id: str) -> SentHostCommand | None:
        return self._one(SentHostCommand, "SELECT data FROM errands WHERE id = ?", errand_id)

    def host_commands(self) -> list[SentHostCommand]:
        return self._all(SentHostCommand, "SELECT data FROM errands ORDER BY sent_at, id")

    def put_host_command_result(self, errand_id: str, result: HostCommandResult) -> None:
        self._write(
            "INSERT INTO errand_results (errand_id, host_id, data) VALUES (?, ?, ?) "
            "ON CONFLICT DO NOTHING",
            errand_id,
            result.host_id,
            rows.to_text(result),
        )

    def host_command_results(self, errands: Sequence[str]) -> dict[str, list[HostCommandResult]]:
        statement = (
            "SELECT errand_id, data FROM errand_results WHERE errand_id IN ({keys}) "
            "ORDER BY errand_id, host_id"
        )
        found: dict[str, list[HostCommandResult]] = {}
        for errand_id, data in self._rows_in_parts(statement, errands):
            found.setdefault(errand_id, []).extend(rows.decode_all([(data,)], HostCommandResult))
        return found

    def delete_host_commands(self, errands: Sequence[str]) -> None:
        keys = [(each,) for each in sorted(errands)]
        self._write_each("DELETE FROM errands WHERE id = ?", keys)
        self._write_each("DELETE FROM errand_results WHERE errand_id = ?", keys)

    # People and facts.

    def put_user(self, user: User) -> None:
        self._write(commits.upsert("users", "name, data"), user.name, rows.to_text(user))

    def user(self, name: str) -> User | None:
        return self._one(User, "SELECT data FROM users WHERE name = ?", name)

    def users(self) -> list[User]:
        return self._all(User, "SELECT data FROM users ORDER BY name")

    def delete_user(self, name: str) -> None:
        def work(session: Session) -> None:
            session.run("DELETE FROM users WHERE name = ?", name)
            session.run("DELETE FROM tokens WHERE owner = ?", name)

        self._database.write(work)

    def put_token(self, token: Token) -> None:
        statement = commits.upsert("tokens", "id, owner, hash, created_at, data")
        self._write(statement, *rows.token_row(token))

    def token_by_hash(self, digest: str) -> Token | None:
        return self._one(Token, "SELECT data FROM tokens WHERE hash = ?", digest)

    def tokens(self, user: str | None = None) -> list[Token]:
        if user is None:
            return self._all(Token, "SELECT data FROM tokens ORDER BY created_at, id")
        return self._all(
            Token, "SELECT data FROM tokens WHERE owner = ? ORDER BY created_at, id", user
        )

    def refresh_token(self, token: Token) -> None:
        self._write("UPDATE tokens SET data = ? WHERE id = ?", rows.to_text(token), token.id)

    def delete_token(self, token_id: str) -> None:
        self._write("DELETE FROM tokens WHERE id = ?", token_id)

    def metadata(self, name: str) -> str | None:
        found = self._rows("SELECT value FROM facts WHERE name = ?", name)
        return found[0][0] if found else None

    def put_metadata(self, name: str, value: str) -> None:
        self._write(commits.upsert("facts", "name, value"), name, value)
