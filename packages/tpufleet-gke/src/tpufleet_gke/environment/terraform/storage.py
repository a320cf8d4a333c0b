"""Stage 1, storage: image registry, buckets, Vertex AI TensorBoard, budget alerts."""

from __future__ import annotations

from typing import Any

from tpufleet_gke.environment.config import names
from tpufleet_gke.environment.config.sections import Budget, Environment
from tpufleet_gke.environment.terraform.hcl import BILLING, Block, Expression, Nested, resource


def resources(environment: Environment) -> list[Block]:
    blocks = []
    if environment.registry.create:
        blocks.append(_registry(environment))
    blocks += [_bucket(environment, name) for name in environment.buckets]
    if environment.tensorboard is not None:
        board = environment.tensorboard
        blocks.append(
            resource(
                "google_vertex_ai_tensorboard", "tensorboard", project=environment.project,
                display_name=board.name, description=board.description,
                region=board.region or environment.region,
            )
        )  # fmt: skip
    if environment.budget is not None:
        blocks.append(_budget(environment, environment.budget))
    return blocks


def _registry(environment: Environment) -> Block:
    return resource(
        "google_artifact_registry_repository", "images", project=environment.project,
        repository_id=environment.registry.name, location=names.registry_location(environment),
        format="DOCKER", description="Images of the server, the provisioner and jobs",
    )  # fmt: skip


def _bucket(environment: Environment, name: str) -> Block:
    settings = environment.buckets[name]
    body: dict[str, Any] = {}
    if settings.hierarchical:
        body["hierarchical_namespace"] = Nested(enabled=True)
    if settings.versioning:
        body["versioning"] = Nested(enabled=True)
    if settings.delete_after_days:
        body["lifecycle_rule"] = Nested(
            action=Nested(type="Delete"), condition=Nested(age=settings.delete_after_days)
        )
    return resource(
        "google_storage_bucket", name, project=environment.project,
        name=names.bucket(environment, name),
        location=(settings.location or environment.region).upper(),
        storage_class=settings.storage_class, uniform_bucket_level_access=True,
        public_access_prevention="enforced", force_destroy=not environment.deletion_protection,
        **body,
    )  # fmt: skip


def _budget(environment: Environment, budget: Budget) -> Block:
    return resource(
        "google_billing_budget", "budget", provider=BILLING,
        billing_account=budget.billing_account,
        display_name=f"{environment.name}: {environment.project}",
        amount=Nested(
            specified_amount=Nested(currency_code="USD", units=str(budget.monthly_usd))
        ),
        budget_filter=Nested(projects=[f"projects/{environment.project}"]),
        threshold_rules=[
            Nested(threshold_percent=percent / 100) for percent in budget.alert_percent
        ],
        # Google Cloud answers with the project's number.
        lifecycle=Nested(ignore_changes=[Expression("budget_filter[0].projects")]),
    )  # fmt: skip
