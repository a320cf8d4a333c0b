"""Google's error texts in few words, with what to do. Pure.

Texts are those of https://cloud.google.com/kubernetes-engine/docs/troubleshooting/node-pools,
…/troubleshooting/tpus and …/troubleshooting/service-accounts, of Compute Engine's resource errors,
and of reports by users. The whole text goes to the log and to an annotation of the event.
"""

from __future__ import annotations

import re

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
# Patterns, and what they mean with what to do. Braces name groups of the pattern; the first that
# matches counts.
_TEXTS = {
    r"constraints/(?P<constraint>[A-Za-z.]+)":
        "policy {constraint} of the organisation forbids it; {advice}",
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
    r'resource "(?P<metric>[^"]+)": request requires \'(?P<wanted>[\d.]+)\' and is short '
    r"'[\d.]+'\. project has a quota of '(?P<limit>[\d.]+)' with '(?P<left>[\d.]+)' available":
        f"quota {{metric}}: {{wanted}} needed, {{left}} of {{limit}} left; {_QUOTAS}",
    r"quota '(?P<metric>[^']+)' exceeded\.\s+limit: (?P<limit>[\d.]+)"
    r" ?(?P<where>in region [a-z]+-[a-z]+\d+)?":
        f"quota {{metric}}: the limit is {{limit}} {{where}}; {_QUOTAS}",
    r"quota exceeded for quota metric|rate limit|too many requests|per minute":
        f"too many requests to GKE; {AGAIN}",
    r"insufficient (\w+ )?quota(.*?resource:? \"(?P<metric>[^\"]+)\")?|GCE_QUOTA_EXCEEDED":
        f"quota used up: {{metric}}; {_QUOTAS}",
    r"IP_SPACE_EXHAUSTED(.*?IP space of '(?P<range>[^']+)' is exhausted)?|"
    r'network "(?P<network>[^"]+)" does not have available private IP space|'
    r"cannot find pod range with enough available IPs":
        "no free IP addresses for nodes or pods: {range}{network}; add a pod range to the cluster "
        "or enlarge its subnetwork",
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
    r"too many operations: |is currently \w+ a node pool|incompatible operation|"
    r"operation .* in progress":
        f"other operations run on the cluster; {AGAIN}",
    r"\binternal error\b": f"internal error of GKE; {AGAIN}",
}  # fmt: skip
_RULES = [(re.compile(each, re.IGNORECASE | re.DOTALL), text) for each, text in _TEXTS.items()]


def known(text: str) -> str | None:
    """What a text means and what to do; None for an unknown text."""
    text = _one_line(text)
    for pattern, meaning in _RULES:
        found = pattern.search(text)
        if found is None:
            continue
        groups = {name: (value or "").removesuffix(".0") for name, value in
                  found.groupdict().items()}  # fmt: skip
        ask = "ask the administrator of your organisation"
        groups["advice"] = _CONSTRAINTS.get(groups.get("constraint", ""), ask)
        return re.sub(r":?\s+;", ";", " ".join(meaning.format(**groups).split()))
    return None


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
