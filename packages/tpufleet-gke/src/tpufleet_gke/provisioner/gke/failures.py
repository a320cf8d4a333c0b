"""Google's error texts: their cause, and in few words what they mean and what to do. Pure.

Texts are those of https://cloud.google.com/kubernetes-engine/docs/troubleshooting/node-pools,
…/troubleshooting/tpus and …/troubleshooting/service-accounts, of Compute Engine's resource errors,
and of reports by users. The whole text goes to the log and to an annotation of the event.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from tpufleet.errors import (
    ASK_ADMINISTRATOR,
    Conflict,
    FleetError,
    NoCapacity,
    Permanent,
    PermissionMissing,
    QuotaExceeded,
)
from tpufleet_gke.provisioner.model.cluster_state import FailureCause, PoolFailure

MAX_LENGTH = 240  # characters of a text that is not known
AGAIN = "it is tried again"
MAKE_POLICIES = "create it with `tpu provisioner --make-policies REGION`"
_QUOTAS = "raise it at https://console.cloud.google.com/iam-admin/quotas"
# GKE quotes the error of the first instance in the middle of counts and names.
_INSTANCE_ERROR = re.compile(
    r"Current errors: \[(?P<code>[A-Z_]+)\]:? (Instance '[^']*' creation failed: )?"
    r"(?P<text>.*?)\.?(\s*'\(resource type:\w+\)'\.?)?\s*(?=$|[;,] \[|\s\(\d+\) )",
    re.DOTALL,
)
_PREFIX = re.compile(r"^(\(1\) )?(Google Compute Engine: |requested resource is exhausted: )?")
_DETAILS = re.compile(r"\s*Details:\s*\[.*", re.DOTALL)
_CONSTRAINTS = {
    "compute.vmExternalIpAccess": "create the cluster with private nodes",
    "compute.requireShieldedVm": "set GCP_NODE_SECURE_BOOT=true",
    "gcp.restrictNonCmekServices": "set GCP_NODE_BOOT_DISK_KMS_KEY",
    "gcp.resourceLocations": "allow other zones in GCP_ZONES",
}
_BY_CONDITION = {
    "GCE_STOCKOUT": FailureCause.OUT_OF_STOCK,
    "GCE_QUOTA_EXCEEDED": FailureCause.QUOTA,
    "GKE_SERVICE_ACCOUNT_DELETED": FailureCause.PERMISSION,
    "NODE_SERVICE_ACCOUNT_MISSING_PERMISSIONS": FailureCause.PERMISSION,
    "CLOUD_KMS_KEY_ERROR": FailureCause.PERMISSION,
    "CLOUD_KMS_KEY_DESTROYED": FailureCause.PERMISSION,
}
# google.rpc.Code
_BY_CODE = {
    3: FailureCause.INVALID_REQUEST,  # INVALID_ARGUMENT
    5: FailureCause.INVALID_REQUEST,  # NOT_FOUND
    7: FailureCause.PERMISSION,  # PERMISSION_DENIED
    11: FailureCause.INVALID_REQUEST,  # OUT_OF_RANGE
    12: FailureCause.INVALID_REQUEST,  # UNIMPLEMENTED
    16: FailureCause.PERMISSION,  # UNAUTHENTICATED
}
# The first that an error is an instance of.
_BY_ERROR: dict[type, FailureCause] = {
    NoCapacity: FailureCause.OUT_OF_STOCK,
    QuotaExceeded: FailureCause.QUOTA,
    PermissionMissing: FailureCause.PERMISSION,
    Conflict: FailureCause.TRANSIENT,
    Permanent: FailureCause.INVALID_REQUEST,
}
RESOURCE_EXHAUSTED = 8
_POLICY = "policy {constraint} of the organisation forbids it; {advice}"
# What texts mean, by cause, with what to do. Braces name groups of the pattern. The first pattern
# that matches counts; of those without a meaning, the text itself is shown.
_OUT_OF_STOCK = {
    r"constraints/(?P<constraint>gcp\.resourceLocations)": _POLICY,
    r"could not find the given reservation with the following name: (?P<name>[^\s.]+)|"
    r"reservation (?P<other>\S+) (was )?not found":
        "reservation {name}{other} does not exist in this zone; check its name, zone and project: "
        "`gcloud compute reservations list`",
    r"reservation (?P<name>\S+) (does not (currently )?have sufficient capacity)|"
    r"requires reservation to be in READY state":
        f"reservation {{name}} is full or not ready; free some of it or wait; {AGAIN}",
    r"reservation (?P<name>\S+) is incorrect for|must use ReservationAffinity of|"
    r"target a reservation with workload_type|aggregate ?reservation":
        "reservation {name} does not fit these nodes; compare its machine type, project and "
        "sharing: `gcloud compute reservations describe`",
    r"machine type with name '(?P<machine>[^']+)' does not exist in zone '(?P<zone>[^']+)'|"
    r'invalid machine type "(?P<other>[^"]+)" in zone "(?P<place>[^"]+)"':
        "{zone}{place} has no {machine}{other}; allow a zone that has it in GCP_ZONES: "
        "`tpu types --zones`",
    r"zones?[/ ]'?(?P<zone>[a-z]+-[a-z]+\d+-[a-z])'? .*?does not have enough resources":
        f"GCE_STOCKOUT: no capacity in {{zone}}; {AGAIN}, also in other zones of GCP_ZONES",
    r"GCE_STOCKOUT|ZONE_RESOURCE_POOL_EXHAUSTED|resource pool exhausted|out of stock|"
    r"no more capacity|does not have enough resources|"
    r"does not (currently )?have sufficient capacity":
        f"GCE_STOCKOUT: no capacity; {AGAIN}, also in other zones of GCP_ZONES",
}  # fmt: skip
_OVER_QUOTA = {
    r'resource "(?P<metric>[^"]+)": request requires \'(?P<wanted>[\d.]+)\' and is short '
    r"'[\d.]+'\. project has a quota of '(?P<limit>[\d.]+)' with '(?P<left>[\d.]+)' available":
        f"quota {{metric}}: {{wanted}} needed, {{left}} of {{limit}} left; {_QUOTAS}",
    r"quota '(?P<metric>[^']+)' exceeded\.\s+limit: (?P<limit>[\d.]+)"
    r" ?(?P<where>in region [a-z]+-[a-z]+\d+)?":
        f"quota {{metric}}: the limit is {{limit}} {{where}}; {_QUOTAS}",
    r"insufficient (\w+ )?quota(.*?resource:? \"(?P<metric>[^\"]+)\")?|GCE_QUOTA_EXCEEDED":
        f"quota used up: {{metric}}; {_QUOTAS}",
    r"IP_SPACE_EXHAUSTED(.*?IP space of '(?P<range>[^']+)' is exhausted)?|"
    r'network "(?P<network>[^"]+)" does not have available private IP space|'
    r"cannot find pod range with enough available IPs":
        "no free IP addresses for nodes or pods: {range}{network}; add a pod range to the cluster "
        "or enlarge its subnetwork",
}  # fmt: skip
_NOT_PERMITTED = {
    r"constraints/(?P<constraint>[A-Za-z.]+)":
        _POLICY,
    r"does not have access to service account \"?(?P<account>[^\s\"]+[^\s\".])|"
    r"permission .iam\.serviceaccounts\.actAs. denied on service account (?P<other>\S+)":
        "the provisioner may not use service account {account}{other}; grant it "
        "roles/iam.serviceAccountUser on that account",
    r"service account \"?(?P<account>[^\s\"]+?)\"? does not exist":
        "service account {account} does not exist; create it, or change GCP_NODE_SERVICE_ACCOUNT",
    r"Kubernetes Engine service account is missing required permissions|PERMISSIONS_ERROR|"
    r"Google Compute Engine: Required '(?P<permission>[a-zA-Z.]+)' permission":
        "GKE's own service account lacks permissions {permission}; grant "
        "roles/container.serviceAgent to "
        "service-PROJECT_NUMBER@container-engine-robot.iam.gserviceaccount.com",
    r"required \"?'?(?P<permission>container\.[a-zA-Z.]+)\"?'? permission":
        "the provisioner lacks {permission}; grant it roles/container.clusterAdmin on the project",
    r"(?P<api>Kubernetes Engine|Compute Engine|Cloud TPU|Cloud KMS) API has not been used|"
    r"SERVICE_DISABLED":
        "the API of {api} is disabled; run `gcloud services enable container.googleapis.com "
        "compute.googleapis.com`",
}  # fmt: skip
_BUSY = {
    r"quota exceeded for quota metric|rate limit|too many requests|per minute":
        f"too many requests to GKE; {AGAIN}",
    r"too many operations: |is currently (\w+ (a node pool|cluster)|being)|incompatible operation|"
    r"operation .* in progress":
        f"other operations run on the cluster; {AGAIN}",
}  # fmt: skip
_BY_STATUS = {
    r"Cloud ?KMS|CLOUD_KMS|cryptoKeys":
        "the key of the boot disks cannot be used; grant Compute Engine's service agent "
        "roles/cloudkms.cryptoKeyEncrypterDecrypter on GCP_NODE_BOOT_DISK_KMS_KEY",
    r"not found: projects/(?P<project>[^/\s]+)/(locations|zones)/(?P<place>[^/\s]+)/clusters/"
    r"(?P<cluster>[^/\s.]+)\.?$":
        "cluster {cluster} does not exist in {place} of project {project}; check GCP_PROJECT_ID, "
        "GCP_CLUSTER_LOCATION and GCP_CLUSTER",
    r"(?P<disk>(pd|hyperdisk)-[a-z]+)\]? (disk type cannot be used by|features are not "
    r"compatible)":
        "these machines cannot have {disk} disks; set GCP_NODE_DISK_TYPE (v6e and tpu7x: "
        "hyperdisk-balanced)",
    r"(/resourcePolicies/|resource policy ')(?P<policy>[^'\s]+)' was not found":
        f"workload policy {{policy}} does not exist; {MAKE_POLICIES}",
    r"/(?P<kind>subnetwork|network)s/(?P<name>[^'\s]+)' was not found":
        "{kind} {name} does not exist; check GCP_NODE_ADDITIONAL_NETWORKS",
    r"\binternal error\b": f"internal error of GKE; {AGAIN}",
}  # fmt: skip
_RULES = [
    (re.compile(pattern, re.IGNORECASE | re.DOTALL), cause, meaning)
    for cause, texts in (
        (FailureCause.OUT_OF_STOCK, _OUT_OF_STOCK),
        (FailureCause.QUOTA, _OVER_QUOTA),
        (FailureCause.PERMISSION, _NOT_PERMITTED),
        (FailureCause.TRANSIENT, _BUSY),
        (None, _BY_STATUS),  # the status code tells the cause
        (
            FailureCause.OUT_OF_STOCK,
            {r"stockout|the reservation must exist in the same project|RESERVATION_[A-Z_]+": ""},
        ),
        # The size of a cluster is a limit of the same sort: someone has to act.
        (
            FailureCause.QUOTA,
            {r"QUOTA_EXCEEDED|quota .*exceeded|exceeded .*quota|byte size limit reached": ""},
        ),
        (
            FailureCause.PERMISSION,
            {r"service account.* does not exist|Required .* permission": ""},
        ),
        (FailureCause.TRANSIENT, {r"try again": ""}),
    )
    for pattern, meaning in texts.items()
]


def _rule(text: str) -> tuple[re.Match[str], FailureCause | None, str] | None:
    for pattern, cause, meaning in _RULES:
        found = pattern.search(text)
        if found is not None:
            return found, cause, meaning
    return None


def known(text: str) -> str | None:
    """What a text means and what to do; None for an unknown text."""
    rule = _rule(_one_line(text))
    if rule is None or not rule[2]:
        return None
    found, _, meaning = rule
    groups = {name: (value or "").removesuffix(".0") for name, value in found.groupdict().items()}
    groups["advice"] = _CONSTRAINTS.get(groups.get("constraint", ""), ASK_ADMINISTRATOR)
    return re.sub(r":?\s+;", ";", " ".join(meaning.format(**groups).split()))


def summarize(text: str) -> str:
    """What it means and what to do; of an unknown text, its first sentences."""
    summary = known(text)
    if summary is not None:
        return summary
    text = _one_line(text)
    instance = _INSTANCE_ERROR.search(text)
    if instance is not None:
        text = f"{instance['code']}: {instance['text']}"
    return _shorten(_PREFIX.sub("", text))


def _one_line(text: str) -> str:
    return _DETAILS.sub("", " ".join(text.split()))


def _shorten(text: str) -> str:
    """Whole sentences up to the limit."""
    if len(text) <= MAX_LENGTH:
        return text.removesuffix(".")
    end = text.rfind(". ", 0, MAX_LENGTH)
    return text[:end] if end > 0 else f"{text[: MAX_LENGTH - 1]}…"


def failure_of(cause: FailureCause, text: str, message: str = "") -> PoolFailure:
    """`message`: instead of a summary of Google's text."""
    return PoolFailure(cause, message or summarize(text), text, unknown=known(text) is None)


def classify_operation(code: int, message: str) -> FailureCause:
    """Of a failed operation. Google's text is more specific than the code."""
    found = _rule(_one_line(message))
    if found is not None and found[1] is not None:
        return found[1]
    if code == RESOURCE_EXHAUSTED:
        return FailureCause.OUT_OF_STOCK
    return _BY_CODE.get(code, FailureCause.TRANSIENT)


def classify_pool(conditions: Iterable[str], message: str) -> FailureCause:
    """Of a pool with an error."""
    causes = (_BY_CONDITION[code] for code in conditions if code in _BY_CONDITION)
    return next(causes, None) or classify_operation(0, message)


def classify_error(error: FleetError) -> FailureCause:
    """Of a rejected call."""
    causes = (cause for kind, cause in _BY_ERROR.items() if isinstance(error, kind))
    return next(causes, FailureCause.TRANSIENT)
