"""Secrets: who may set them, whose jobs get them, and where their values never are."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.service.harness import ServiceHarness
from tpufleet.errors import BadInput, Conflict, Forbidden, NotFound
from tpufleet.model.api_types import SecretNames
from tpufleet.model.people.users import Role
from tpufleet.service.files import secrets as secret_files
from tpufleet.service.files.secrets import JobSecrets
from tpufleet.service.operations import log_redaction

CANARY = "canary-7f3a9"


NOBODYS = SecretNames(own=(), shared=())


@pytest.mark.parametrize(("shared", "place"), [(True, "shared"), (False, "own/ada")])
def test_a_secret_is_an_encrypted_object_of_the_store(service, shared, place):
    admin, key = service.client("ada"), f"secrets/{place}/hf"
    admin.put_secret("hf", CANARY, shared=shared)
    assert CANARY.encode() not in service.store.read_objects([key])[key]
    listed = SecretNames(own=("hf",) * (not shared), shared=("hf",) * shared)
    assert admin.secrets() == listed
    with pytest.raises(NotFound):
        admin.delete_secret("hf", shared=not shared)
    admin.delete_secret("hf", shared=shared)
    assert not service.store.read_objects([key])
    with pytest.raises(NotFound):
        admin.delete_secret("hf", shared=shared)


def test_a_job_gets_its_owners_secret_before_the_one_that_all_share(service):
    service.client("ada").put_secret("hf", "everybody's", shared=True)
    service.client("mel").put_secret("hf", "mel's")
    assert secret_of_a_job(service, "mel", 1) == "mel's"
    assert secret_of_a_job(service, "ada", 2) == "everybody's"


def test_nobody_gets_the_secret_of_another_person(service):
    service.client("mel").put_secret("hf", CANARY)
    assert service.client("ada").secrets() == NOBODYS
    with pytest.raises(BadInput, match="no secret named 'hf'"):
        service.submit("job-1", by="ada", secrets={"HF": "hf"})
    with pytest.raises(NotFound):
        service.client("ada").delete_secret("hf")
    assert service.client("mel").secrets().own == ("hf",)


def test_only_an_admin_changes_what_all_share(service):
    service.client("ada").put_secret("hf", CANARY, shared=True)
    for change in (
        lambda: service.client("mel").put_secret("hf", "mine", shared=True),
        lambda: service.client("mel").delete_secret("hf", shared=True),
    ):
        with pytest.raises(Forbidden, match="admin"):
            change()
    assert secret_of_a_job(service, "mel", 1) == CANARY


def test_the_secrets_of_a_user_go_with_the_user(service):
    service.client("mel").put_secret("hf", CANARY)
    service.client("ada").delete_user("mel")
    service.add_user("mel", Role.MEMBER)
    assert service.client("mel").secrets() == NOBODYS


def secret_of_a_job(service: ServiceHarness, owner: str, number: int) -> str:
    job, slice_id = f"job-{number}", f"s{number}"
    service.submit(job, by=owner, secrets={"HF": "hf"})
    service.add_slice(slice_id, job)
    service.add_attempt(job, 0, slice_id)
    return service.send_heartbeat(f"{slice_id}/0", boot="new").assignment.secrets["HF"]


@pytest.mark.parametrize("name", ["../token", "a/b", ".hidden", "..", "", "a\0b", "x" * 65, "ü"])
def test_a_secret_name_never_leads_out_of_the_folder(shared_service, name):
    before = sorted(path.name for path in shared_service.folder.iterdir())
    with pytest.raises((BadInput, NotFound)):
        shared_service.client("ada").put_secret(name, "x")
    with pytest.raises((BadInput, NotFound)):
        shared_service.client("ada").delete_secret(name)
    assert sorted(path.name for path in shared_service.folder.iterdir()) == before


def test_a_secret_cannot_pose_as_a_file_of_the_host(service):
    with pytest.raises(BadInput, match="file:"):
        service.client("ada").put_secret("hf", "file:/etc/shadow")
    assert service.client("ada").secrets() == NOBODYS


def test_a_user_cannot_fill_the_disk_with_secrets(service, monkeypatch):
    monkeypatch.setattr(secret_files, "MAX_SECRETS", 3)
    client = service.client("mel")
    for number in range(3):
        client.put_secret(f"hf-{number}", CANARY)
    with pytest.raises(Conflict, match=r"3 secrets.*\n.*tpu secret delete"):
        client.put_secret("hf-3", CANARY)
    client.put_secret("hf-1", "another value")
    service.client("mo").put_secret("hf-3", CANARY)


def test_parallel_requests_do_not_exceed_the_limit_of_secrets(service, monkeypatch):
    monkeypatch.setattr(secret_files, "MAX_SECRETS", 3)
    files = JobSecrets(service.store, KEYS, service.clock)

    def put(number: int) -> bool:
        try:
            files.put(f"hf-{number}", CANARY, "mel")
        except Conflict:
            return False
        return True

    with ThreadPoolExecutor(8) as threads:
        assert sum(threads.map(put, range(8))) == 3
    assert len(files.names("mel")) == 3


REFUSED = {
    "too long": "z" * (secret_files.MAX_SECRET_BYTES + 1),
    "null character": "not-stored\0null",
    "file": "file:/not/stored",
}


@pytest.mark.parametrize("value", REFUSED.values(), ids=REFUSED)
def test_a_value_that_is_refused_is_not_masked_in_the_log(service, value):
    with pytest.raises(BadInput):
        service.client("mel").put_secret("hf", value)
    assert log_redaction.redact(f"log {value}") == f"log {value}"


def test_a_value_above_the_limit_of_secrets_is_not_masked_in_the_log(service, monkeypatch):
    monkeypatch.setattr(secret_files, "MAX_SECRETS", 0)
    with pytest.raises(Conflict):
        service.client("mel").put_secret("hf", "one-too-many")
    assert log_redaction.redact("log one-too-many") == "log one-too-many"


def test_a_secret_is_masked_in_the_log_until_it_is_replaced_or_deleted(service):
    client = service.client("mel")
    client.put_secret("hf", "is refused and cannot be read")
    line = "job-1 is refused and cannot be read"
    assert log_redaction.redact(line) == "job-1 ***"
    client.put_secret("hf", "second-value")
    assert log_redaction.redact(line) == line
    assert log_redaction.redact("second-value") == "***"
    client.delete_secret("hf")
    assert log_redaction.redact("second-value") == "second-value"


def test_secrets_of_a_deleted_user_are_not_masked_in_the_log(service):
    service.client("mel").put_secret("hf", "value-of-mel")
    service.client("ada").put_secret("hf", "value-of-all", shared=True)
    assert log_redaction.redact("value-of-mel") == "***"
    service.client("ada").delete_user("mel")
    assert log_redaction.redact("value-of-mel") == "value-of-mel"
    assert log_redaction.redact("value-of-all") == "***"


def test_a_secret_that_a_live_job_needs_cannot_be_dropped(service):
    service.client("ada").put_secret("hf", CANARY, shared=True)
    service.submit("job-1", secrets={"HF": "hf"})
    with pytest.raises(Conflict, match="job-1"):
        service.client("ada").delete_secret("hf", shared=True)
    service.client("mel").put_secret("hf", CANARY)
    service.client("ada").delete_secret(
        "hf", shared=True
    )  # the job gets its owner's own from now on
    with pytest.raises(Conflict, match="job-1"):
        service.client("mel").delete_secret("hf")
    service.end_job("job-1")
    service.client("mel").delete_secret("hf")


def everything_told(service: ServiceHarness) -> str:
    client = service.client("ada")
    responses = [client.job("job-1"), client.why("job-1"), client.events(), client.jobs()]
    kept = [service.store.live(), service.store.inbox(), service.store.tokens()]
    return repr(responses) + repr(kept) + "".join(client.logs("job-1"))


def test_the_value_of_a_secret_is_told_to_the_agents_of_its_job_and_to_nobody_else(service, caplog):
    caplog.set_level("DEBUG")
    service.client("mel").put_secret("hf", CANARY)
    service.submit("job-1", secrets={"HF": "hf"})
    service.add_slice("s1", "job-1")
    service.add_slice("s2", None)
    service.add_attempt("job-1", 0, "s1")
    assert service.send_heartbeat("s1/0", boot="new").assignment.secrets == {"HF": CANARY}
    assert service.send_heartbeat("s2/0", boot="new").assignment is None
    assert CANARY not in everything_told(service)
    assert CANARY not in caplog.text
    holders = [
        path for path in service.folder.rglob("*") if path.is_file() and CANARY in path.read_text()
    ]
    assert holders == []


KEYS = [b"1" * 32, b"2" * 32]


def test_secrets_of_an_earlier_key_are_encrypted_again(service):
    def with_keys(*keys: bytes) -> JobSecrets:
        return JobSecrets(service.store, keys, service.clock)

    with_keys(KEYS[0]).put("hf", CANARY, "ada")
    with_keys(KEYS[0]).put("wandb", "other-canary")
    secrets = with_keys(*KEYS[::-1])
    assert secrets.get("hf", "ada") == CANARY and secrets.get("wandb", "ada") == "other-canary"
    assert secrets.encrypt_again() == 2 and secrets.encrypt_again() == 0
    assert with_keys(KEYS[1]).get("hf", "ada") == CANARY
    assert with_keys(KEYS[0]).get("hf", "ada") is None


def test_only_an_admin_reads_files_of_the_servers_machine_in_simulated_jobs(service):
    secrets = {"KEY": f"file:{service.folder}/token"}
    for providers in (["local"], ["tpu-vm", "local"]):
        with pytest.raises(Forbidden, match=r"secrets.KEY: .*admin role.*tpu secret set"):
            service.submit("job-1", by="mel", secrets=secrets, providers=providers)
    service.submit("job-2", by="mel", secrets=secrets, providers=["tpu-vm"])
    service.submit("job-3", by="ada", secrets=secrets, providers=["local"])
