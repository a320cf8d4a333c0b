"""Tables generated from the code; `python -m tests.docs.generated_tables` updates the pages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from tests.docs import markdown
from tpufleet import schema
from tpufleet.model.job.end_reasons import END_REASONS
from tpufleet.model.job.job_file import FIELDS
from tpufleet.model.job.jobs import Rule
from tpufleet.model.people.users import Role
from tpufleet.policy.recovery import retry_rules
from tpufleet.service.api.routes import ROUTES
from tpufleet_gke.environment.config.sections import Environment
from tpufleet_gke.provisioner.settings import ProvisionerSettings


def lines(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [_row(titles), "|" + "---|" * len(titles), *(_row(row) for row in rows)]


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def fields() -> list[str]:
    return lines(
        ("field", "type", "default", "meaning", "example"),
        ((f"`{f.name}`", f.label, f.default, f.description, f"`{f.example}`") for f in FIELDS),
    )


def endings() -> list[str]:
    return lines(
        ("reason", "means", "recognised by", "retries", "what you can do"),
        (
            (
                f"`{reason}`",
                ending.description,
                ending.detected_by,
                ending.budget,
                ending.advice or "–",
            )
            for reason, ending in END_REASONS.items()
        ),
    )


def rules() -> list[str]:
    return lines(
        ("rule", *(reason.replace("_", " ") for reason in retry_rules.GOVERNED_REASONS)),
        (
            (
                f"`{rule}`",
                *(str(retry_rules.rule_action(rule, r)) for r in retry_rules.GOVERNED_REASONS),
            )
            for rule in Rule
        ),
    )


def routes() -> list[str]:
    return lines(
        ("route", "for", "what"),
        (
            (
                f"`{route.method} {route.path}`",
                str(route.role) if isinstance(route.role, Role) else "agent",
                route.summary,
            )
            for route in ROUTES
        ),
    )


def cluster_file() -> list[str]:
    """Fields of cluster.yaml; those of a section follow it."""
    return lines(
        ("field", "type", "default", "meaning"),
        (
            (f"`{row.name}`", row.label, row.default, row.description)
            for row in schema.rows(Environment, nested=True)
        ),
    )


def provisioner_settings() -> list[str]:
    return lines(
        ("variable", "default", "meaning"),
        (
            (f"`{row.name}`", row.default, row.description)
            for row in schema.rows(ProvisionerSettings)
        ),
    )


EXACT: dict[str, tuple[Path, Callable[[], list[str]]]] = {
    "fields": (markdown.DOCS / "job-file.md", fields),
    "endings": (markdown.DOCS / "recovery.md", endings),
    "rules": (markdown.DOCS / "recovery.md", rules),
    "cluster-file": (markdown.DOCS / "gke-environment.md", cluster_file),
    "provisioner-settings": (markdown.DOCS / "provisioner.md", provisioner_settings),
    "routes": (markdown.DOCS / "api.md", routes),
}


def update_pages() -> None:
    for name, (page, render) in EXACT.items():
        mark = f"<!-- table: {name} -->\n"
        before, _, after = page.read_text().partition(mark)
        old = "".join(f"{line}\n" for line in markdown.table(page, name))
        new = "".join(f"{line}\n" for line in render())
        page.write_text(before + mark + new + after.removeprefix(old))


if __name__ == "__main__":
    update_pages()
