"""Permissions of Google Cloud that the repository names exist; Google refuses a custom role or a
check of permissions with any other."""

from __future__ import annotations

import re
from collections.abc import Iterator

from tests.environment.environments import environment, example
from tests.environment.provider_checks import resources
from tests.repository import ROOT
from tpufleet_testbed.terraform.emulated_google_cloud import published_permissions

PUBLISHED = published_permissions()
SERVICES = "|".join(sorted({name.partition(".")[0] for name in PUBLISHED}))
# Not a call, an attribute or a domain name.
NAMED = re.compile(
    rf"(?<![\w./@-])(?:{SERVICES})\.(?!googleapis|gke\.|iam\.gs)[a-z]\w+\.(?:\*|[a-z]\w+)(?![\w(.])"
)
TEXTS = ("docs/**/*.md", "deploy/**/*.yaml", "examples/**/*.md", "packages/*/src/**/*.py")
IN_QUOTES = re.compile(rf"(?<=[\"'`]){NAMED.pattern}")  # in tests, which are full of attributes
TESTS = ("packages/*/tests/**/*.py", "tests/**/*.py")
# The emulator names methods and kinds of operations; Google is to refuse a role with another.
OTHERS = ("compute_engine", "test_plan_and_apply.py")


def named() -> Iterator[tuple[str, str]]:
    for pattern in (*TEXTS, *TESTS):
        form = IN_QUOTES if pattern in TESTS else NAMED
        for path in ROOT.glob(pattern):
            if not {*OTHERS} & {*path.parts}:
                for match in form.finditer(path.read_text()):
                    yield str(path.relative_to(ROOT)), match[0]


def test_every_permission_that_is_named_exists():
    found = list(named())
    assert len(found) > 20
    assert [each for each in found if each[1] not in PUBLISHED] == []


def test_the_role_of_the_provisioner_has_permissions_that_exist():
    [role] = resources(example(), "google_project_iam_custom_role")
    granted = set(role.body["permissions"])
    assert granted <= PUBLISHED
    # https://cloud.google.com/kubernetes-engine/docs/reference/rest/v1: methods of node pools
    assert {"container.clusters.get", "container.clusters.update"} <= granted
    assert {"compute.resourcePolicies.create", "compute.resourcePolicies.list"} <= granted


def roles_of(built, kind: str, account: str) -> set[str]:
    return {
        block.body["role"]
        for block in resources(built, kind)
        if account in block.labels[1] and isinstance(block.body["role"], str)
    }


def test_the_automation_account_may_create_what_the_file_asks_for():
    project, billing = "google_project_iam_member", "google_billing_account_iam_member"
    plain = roles_of(environment(), project, "automation")
    assert "roles/compute.securityAdmin" in plain  # the firewall rule of webhooks
    assert not roles_of(environment(), billing, "automation")
    pool = {"type": "tpu7x-64", "managed_by": "terraform"}
    budget = {"billing_account": "012345-567890-ABCDEF", "monthly_usd": 100}
    built = environment(tpu_pools={"a": pool}, budget=budget)
    assert "roles/compute.instanceAdmin.v1" in roles_of(built, project, "automation") - plain
    assert roles_of(built, billing, "automation") == {"roles/billing.costsManager"}


def test_only_an_environment_with_the_firestore_bridge_has_its_account():
    def accounts(built) -> set[str]:
        blocks = resources(built, "google_service_account")
        return {str(block.body["account_id"]) for block in blocks}

    assert "ml-tpufleet-bridge" not in accounts(environment())
    assert "ml-tpufleet-bridge" in accounts(environment(server={"firestore_bridge": True}))
