"""Settings: what wins, and which tokens are refused."""

from __future__ import annotations

import json
import os
import re
import textwrap
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.repository import ROOT
from tpufleet import config
from tpufleet.compose import control_plane
from tpufleet.compose import providers as compose
from tpufleet.errors import BadInput, Unauthorized, readable_by_others
from tpufleet.stores.memory import MemoryStore


@pytest.fixture
def home(tmp_path):
    return tmp_path


def write_config(home: Path, text: str) -> None:
    folder = home / ".config" / "tpufleet"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(text)


def test_the_defaults_are_local(home):
    settings = config.load({}, home)
    assert settings.server is None and settings.store is None
    assert settings.home == home / ".local/share/tpufleet"
    assert settings.default_provider == "local" and settings.listen == "127.0.0.1:0"
    assert settings.snapshot_limit == 100 * 2**20


def test_the_environment_overrides_the_file(home):
    write_config(home, "server: https://file:1\nprovider: gke\nsnapshot_limit: 1G\n")
    assert config.load({}, home).server == "https://file:1"
    settings = config.load({"TPUFLEET_SERVER": "https://environment:2/"}, home)
    assert settings.server == "https://environment:2"
    assert (settings.provider, settings.snapshot_limit) == ("gke", 2**30)


def test_a_server_with_a_certificate_needs_its_key_from_a_file_or_an_option(home):
    write_config(home, "tls_cert: cert\nlisten: 80\n")
    _, errors = config.load_valid({}, home, serve=True)
    assert len(errors) == 2
    assert errors[1].endswith("config.yaml: tls_cert: requires tls_key; set both, or neither")
    _, errors = config.load_valid({}, home, serve=True, tls_options=True)
    assert len(errors) == 1, "checked with the options"
    _, errors = config.load_valid({}, home)
    assert len(errors) == 1, "a client needs neither"


@pytest.mark.parametrize(
    ("variable", "meant"),
    [
        ("TPUFLEET_BUDGET", "TPUFLEET_BUDGETS"),
        ("TPUFLEET_LOG_FROMAT", "TPUFLEET_LOG_FORMAT"),
        ("TPUFLEET_server", "TPUFLEET_SERVER"),
        ("TPUFLEET_HOM", "TPUFLEET_HOME"),
    ],
)
def test_a_misspelt_variable_is_named_with_the_one_that_was_meant(variable, meant):
    warnings = config.misspelt_variables({variable: "x", meant: "y", "PATH": "/bin"})
    assert warnings == [f"{variable}: unknown variable; did you mean {meant}?"]


def test_variables_of_jobs_agents_and_tests_are_not_misspelt():
    sources = [
        path for ending in ("py", "sh") for path in ROOT.glob(f"packages/*/src/**/*.{ending}")
    ]
    sources += [*ROOT.glob("tests/*.py"), *ROOT.glob("scripts/*.py")]
    named = {
        name
        for path in sources
        for name in re.findall(r"\bTPUFLEET_[A-Z][A-Z_]*[A-Z]\b", path.read_text())
    }
    assert len(named) > 50
    typos = {"TPUFLEET_BUDGET", "TPUFLEET_LOG_FROMAT", "TPUFLEET_HOM"}
    assert config.misspelt_variables(dict.fromkeys(named - typos, "x")) == []


def test_an_empty_variable_counts_as_unset(home):
    write_config(home, "server: https://file:1\n")
    assert config.load({"TPUFLEET_SERVER": ""}, home).server == "https://file:1"


def test_loading_is_deterministic(home):
    environ = {"TPUFLEET_HOME": str(home / "state"), "TPUFLEET_STORE": "postgresql://db/fleet"}
    assert config.load(environ, home) == config.load(environ, home)
    assert config.load(environ, home).home == home / "state"
    assert config.load(environ, home).store == "postgresql://db/fleet"


@pytest.mark.parametrize(
    ("environ", "file", "message"),
    [
        ({"TPUFLEET_SERVER": "host:80"}, "",
         "TPUFLEET_SERVER: 'host:80' is not a server URL; for example https://host:port"),
        ({"TPUFLEET_SERVER": "http://h:99999"}, "", "is not a server URL"),
        ({"TPUFLEET_SNAPSHOT_LIMIT": "lots"}, "",
         "TPUFLEET_SNAPSHOT_LIMIT: 'lots' is not a size in bytes"),
        ({"TPUFLEET_LISTEN": "80"}, "", "is not HOST:PORT; for example 127.0.0.1:8470"),
        ({}, "sever: x", "sever: unknown field; did you mean server?"),
        ({}, "colour: x", "colour: unknown field; write one of server, token_file"),
        ({}, "[1, 2]", "must be a mapping"),
        ({}, "store: x\nlisten: [", "config.yaml:2: not valid YAML"),
        ({}, "store: x\n\nsever: y", "config.yaml:3: sever: unknown field"),
        ({}, "data: /a\nlisten: 80\ndata: /b", "config.yaml:3: data: duplicate key; remove one"),
        ({}, "data: /a\nlisten: 80\ndata: /b", "is not HOST:PORT"),
        ({}, "retention:\n  logs: none\n  logs: none", "config.yaml:3: logs: duplicate key"),
        ({"TPUFLEET_CONFIG": "/usr"}, "", "/usr: is a folder; TPUFLEET_CONFIG must name a file"),
    ],
)  # fmt: skip
def test_an_invalid_setting_is_reported_with_source_and_hint(home, environ, file, message):
    write_config(home, file)
    with pytest.raises(BadInput) as caught:
        config.load(environ, home)
    assert message in str(caught.value)


INVALID = {
    "sever": ("x", "unknown field; did you mean server?"),
    "colour": ("x", "unknown field"),
    "server": ("host:80", "is not a server URL"),
    "public_url": ("host", "is not a server URL"),
    "store": ("mysql://me:pw@host/db", "unknown store 'mysql:…'; write memory:, sqlite:///path"),
    "provider": ("mars", "unknown provider 'mars'; write one of local"),
    "token_file": ("5", "5 is not a path; for example /path/to/file"),
    "tls_key": ("[a]", "a list is not a path"),
    "providers": ("[clowd]", "unknown provider 'clowd'"),
    "listen": ("127.0.0.1:99999", "is not HOST:PORT"),
    "request_timeout": ("soon", "request_timeout"),
    "insecure_http": ("maybe", "must be true or false"),
    "snapshot_limit": ("lots", "is not a size in bytes"),
    "log_limit": ("lots", "is not a size in bytes"),
    "log_format": ("xml", "unknown value"),
    "secrets_kms_key": ("k", "secrets_kms_key"),
    "local_containers": ("maybe", "must be true or false"),
    "local_hosts": ("-1", "must be an integer from 1"),
    "slices_per_user": ("none", "must be an integer from 1"),
    "tokens_per_user": ("many", "must be an integer from 1"),
    "fair_share_half_life": ("long", "fair_share_half_life"),
    "max_hosts_lost_percent": ("200", "must be an integer from 1 to 100"),
    "bucket": ("s3://x", "is not a Cloud Storage location"),
    **{
        key: ("3", "must be a mapping")
        for key in ("retention", "tpu_vm", "gke", "prices", "budgets", "notifications")
    },
}


@given(st.lists(st.sampled_from(sorted(INVALID)), unique=True, min_size=1))
def test_all_errors_of_a_config_file_are_reported_at_once(keys):
    with TemporaryDirectory() as folder:
        home = Path(folder)
        lines = [f"{key}: {INVALID[key][0]}" for key in keys]
        write_config(home, "\n".join(["data: /srv/fleet", *lines]))
        with pytest.raises(BadInput) as caught:
            config.load({}, home)
        reported = str(caught.value).splitlines()
        assert len(reported) == len(keys)
        for key in keys:
            assert any(
                re.search(rf": {key}(\[0\])?: ", line) and INVALID[key][1] in line
                for line in reported
            )
        settings, errors = config.load_valid({}, home)
    assert sorted(errors) == sorted(reported)
    assert settings.data == Path("/srv/fleet"), "what is valid is used"


NESTED = """
    sever: x
    retention: {logs: 5x, cod: none, events: {size: 1G}, code: 3}
    budgets:
      {user: {}, users: {alice: much, bob: {usd: 3, perod: day}}, pools: {lab: {usd: x}},
       period: year}
    prices: {v99: {spot: 1}, v5e: {spto: 1, spot: -1}, v4: 3}
    notifications:
      {alow: [], allow: [10.0.0.1/8], email_domains: [a b, example.com],
       smtp: {host: h, sender: me, port: 99999, username: 5, starttls: "x"}}
    tpu_vm:
      {project: X, zones: [moon], tags: [A B], valid_for: soon, bundle: x, wheel: y, netwrk: z,
       metadata: {startup-script: x, owner: 5}, external_ips: 3, runtimes: {v99: x}, endpoint: foo,
       queue: [spto, spot], data_disks: 5}
    gke:
      {image: a b, zones: us-central1, cpu: lots, user: root, reservations: {v99-4: x}, qeue: q,
       platform: gpu, pull_policy: Sometimes, extra_selector: 3, pull_secrets: 5}
"""
NESTED_ERRORS = {
    "sever": "did you mean server?",
    "retention.logs": "'5x' is not a duration; for example 90s",
    "retention.cod": "did you mean code?",
    "retention.events": "is not a duration",
    "retention.code": "must be from 1h",
    "budgets.user": "did you mean users?",
    "budgets.users.alice.usd": "must be a number from 0",
    "budgets.users.bob.perod": "did you mean period?",
    "budgets.pools.lab.usd": "must be a number",
    "budgets.period": "unknown value 'year'",
    "prices.v99": "unknown generation 'v99'",
    "prices.v5e.spto": "did you mean spot?",
    "prices.v5e.spot": "must be a number of at least 0",
    "prices.v4": "must be a mapping",
    "notifications.alow": "did you mean allow?",
    "notifications.allow[0]": "'10.0.0.1/8' is neither a host name nor a network",
    "notifications.smtp.sender": "is not an e-mail address",
    "notifications.email_domains[0]": "'a b' is not a domain; for example example.com",
    "notifications.smtp.port": "must be an integer from 1 to 65535",
    "notifications.smtp.username": "must be text, not 5; put it in quotes",
    "notifications.smtp.starttls": "must be true or false",
    "tpu_vm.project": "'X' is not a project id",
    "tpu_vm.zones[0]": "'moon' is not a zone; for example us-central1-a",
    "tpu_vm.tags[0]": "'A B' is not a network tag",
    "tpu_vm.valid_for": "'soon' is not a duration",
    "tpu_vm.bundle": "is not a gs:// or https:// URL",
    "tpu_vm.wheel": "unknown field",
    "tpu_vm.netwrk": "did you mean network?",
    "tpu_vm.metadata.startup-script": "is not a metadata key",
    "tpu_vm.metadata.owner": "must be text",
    "tpu_vm.external_ips": "must be true or false",
    "tpu_vm.runtimes.v99": "unknown generation 'v99'; write one of tpu7x, v2",
    "tpu_vm.endpoint": "'foo' is not a host:port",
    "tpu_vm.queue[0]": "did you mean spot?",
    "tpu_vm.data_disks": "must be a mapping",
    "gke.platform": "unknown value 'gpu'",
    "gke.pull_policy": "unknown value 'Sometimes'",
    "gke.extra_selector": "must be a mapping",
    "gke.pull_secrets": "must be text",
    "gke.image": "'a b' is not an image",
    "gke.zones[0]": "'us-central1' is not a zone",
    "gke.cpu": "'lots' is not an amount",
    "gke.user": "must be an integer",
    "gke.reservations.v99-4": "unknown TPU type 'v99-4'",
    "gke.qeue": "did you mean queue?",
}


def test_all_errors_of_all_sections_are_reported_at_once_with_their_path(home):
    write_config(home, textwrap.dedent(NESTED))
    with pytest.raises(BadInput) as caught:
        config.load({}, home)
    lines = [line.partition("config.yaml")[2] for line in str(caught.value).splitlines()]
    reported = {line.split(": ")[1]: line for line in lines}
    assert reported.keys() == NESTED_ERRORS.keys()
    assert [path for path, text in NESTED_ERRORS.items() if text not in reported[path]] == []
    settings, _ = config.load_valid({}, home)
    assert (settings.retention, settings.tpu_vm, settings.gke) == (None, None, None)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ("tpu_vm: {zones: moon}", "tpu_vm.zones: 'moon' is not a zone"),
        ("tpu_vm: {data_disks: [{}]}", "tpu_vm.data_disks[0].source: required"),
        ("tpu_vm: {data_disks: [{source: 5}]}", "tpu_vm.data_disks[0].source: must be text"),
        ("tpu_vm: {data_disks: [x]}", "tpu_vm.data_disks[0]: must be a mapping"),
        ("tpu_vm: {valid_for: none}", "tpu_vm.valid_for: cannot be none"),
        ("tpu_vm: {bundle: 'gs://b/x'}", "tpu_vm.bundle: set both bundle"),
        ("gke: {most_slices: 1.5}", "gke.most_slices: must be an integer"),
        ("notifications: {allow: [bad host]}", "'bad host' is neither a host name nor a network"),
        ('notifications: {allow: [""]}', "'' is neither a host name nor a network"),
        ("budgets: {pools: 3}", "budgets.pools: must be a mapping"),
    ],
)
def test_an_error_in_a_section_is_in_plain_words(home, section, message):
    write_config(home, section)
    _, errors = config.load_valid({}, home)
    assert len(errors) == 1 and message in errors[0]


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"TPUFLEET_RETENTION": '{"logs": "5x"}'},
         "TPUFLEET_RETENTION: retention.logs: "),
        ({"TPUFLEET_GKE_CPU": "lots"}, "TPUFLEET_GKE_CPU: gke.cpu: "),
    ],
)  # fmt: skip
def test_an_error_in_a_section_names_the_variable_that_it_is_from(home, environ, message):
    with pytest.raises(BadInput, match=message):
        config.load(environ, home)


SECTION = "tpu_vm: {network: mine}\nretention: {logs: 3}"


def test_only_a_server_needs_complete_sections_and_only_of_enabled_providers(home):
    write_config(home, SECTION)
    missing = {"tpu_vm.project": "required", "tpu_vm.zones": "required"}
    for options, expected in [({}, {}), ({"serve": True, "enable": ["local"]}, {}),
                              ({"serve": True}, missing)]:  # fmt: skip
        _, errors = config.load_valid({}, home, **options)
        text = "\n".join(errors)
        assert len(errors) == 1 + len(expected), "and that of retention"
        assert all(f"{path}: {problem}" in text for path, problem in expected.items())


def test_a_token_file_readable_by_others_is_rejected(home):
    file = home / "token"
    file.write_text("abc\n")
    file.chmod(0o644)
    settings = config.load({"TPUFLEET_TOKEN_FILE": str(file)}, home)
    with pytest.raises(Unauthorized) as caught:
        config.read_token(settings, "https://fleet")
    assert str(caught.value) == str(readable_by_others(file))
    file.chmod(0o600)
    assert config.read_token(settings, "https://fleet") == "abc"


@pytest.mark.parametrize("url", ["HTTPS://Fleet:1", "Https://Fleet:1/", "https://Fleet:1"])
def test_the_scheme_of_a_server_may_be_in_capitals(home, url):
    settings = config.load({"TPUFLEET_SERVER": url, "TPUFLEET_PUBLIC_URL": url}, home)
    assert settings.server == settings.public_url == "https://Fleet:1"


def test_the_token_in_the_state_folder_is_only_sent_to_this_machine(home):
    settings = config.load({"TPUFLEET_HOME": str(home)}, home)
    (home / "token").write_text("local")
    (home / "token").chmod(0o600)
    assert config.read_token(settings, "http://127.0.0.1:8470") == "local"
    assert config.read_token(settings, "http://localhost:8470") == "local"
    with pytest.raises(Unauthorized, match="no token for https://elsewhere"):
        config.read_token(settings, "https://elsewhere")


def test_a_leading_tilde_is_the_home_of_the_user(home):
    settings = config.load({"TPUFLEET_HOME": "~/fleet", "TPUFLEET_TOKEN_FILE": "/a~b/t"}, home)
    assert (settings.home, settings.token_file) == (home / "fleet", Path("/a~b/t"))


@pytest.mark.parametrize("content", ["", "  \n", "a\x1bb"])
def test_a_file_without_a_token_is_rejected(home, content):
    (home / "token").write_text(content)
    (home / "token").chmod(0o600)
    with pytest.raises(Unauthorized, match="no token in it"):
        config.read_secret_file(home / "token")
    with pytest.raises(Unauthorized, match="cannot read"):
        config.read_secret_file(home / "nowhere")


def test_an_embedded_server_is_found_while_its_process_runs(home):
    def write_record(**record):
        (home / "server.json").write_text(json.dumps(record))

    assert config.embedded_server_url(home) is None
    write_record(url="http://127.0.0.1:1", pid=os.getpid())
    assert config.embedded_server_url(home) == "http://127.0.0.1:1"
    assert config.embedded_certificate(home, "http://127.0.0.1:1") is None
    write_record(url="https://10.0.0.1:1", pid=os.getpid(), certificate="/c.pem")
    assert config.embedded_certificate(home, "https://10.0.0.1:1") == Path("/c.pem")
    assert config.embedded_certificate(home, "https://10.0.0.2:1") is None
    write_record(url="http://127.0.0.1:1", pid=2**22 + 1)  # larger than any pid that Linux gives
    assert config.embedded_server_url(home) is None
    (home / "server.json").write_text("{half")
    assert config.embedded_server_url(home) is None


def test_the_data_folder_can_be_shared(tmp_path):
    settings = config.load({"TPUFLEET_HOME": "/a", "TPUFLEET_DATA": "/shared"}, tmp_path)
    assert (settings.home, settings.data) == (Path("/a"), Path("/shared"))
    assert config.load({"TPUFLEET_HOME": "/a"}, tmp_path).data == Path("/a")


@pytest.mark.parametrize("text", ["0", "-1", "many", "1.5"])
def test_the_slice_quota_is_a_positive_number(tmp_path, text):
    assert config.load({"TPUFLEET_SLICES_PER_USER": "8"}, tmp_path).slices_per_user == 8
    with pytest.raises(BadInput, match=r"TPUFLEET_SLICES_PER_USER: must be "):
        config.load({"TPUFLEET_SLICES_PER_USER": text}, tmp_path)


def test_the_share_of_hosts_that_may_be_lost_is_a_percentage(tmp_path):
    assert config.load({}, tmp_path).max_hosts_lost_percent == 20
    variable = "TPUFLEET_MAX_HOSTS_LOST_PERCENT"
    assert config.load({variable: "5"}, tmp_path).max_hosts_lost_percent == 5
    for wrong in ("0", "101", "many", "20%"):
        with pytest.raises(BadInput, match="from 1 to 100"):
            config.load({variable: wrong}, tmp_path)


TPU_VM = {
    "TPUFLEET_TPU_VM": '{"project": "my-project", "zones": ["us-central1-a"], '
    '"bundle": "gs://my-bucket/bundle.tar.gz", "bundle_sha256": "' + "0" * 64 + '"}'
}
GKE = {"TPUFLEET_GKE_IMAGE": "registry/agent:1"}


@pytest.mark.parametrize(
    ("environ", "enabled"),
    [
        pytest.param({}, ("local",), id="alone on loopback"),
        pytest.param({"TPUFLEET_LISTEN": "localhost:1"}, ("local",), id="localhost"),
        pytest.param({"TPUFLEET_LISTEN": "[::1]:1"}, ("local",), id="IPv6 loopback"),
        pytest.param({"TPUFLEET_LISTEN": "0.0.0.0:1"}, (), id="all interfaces"),
        pytest.param({"TPUFLEET_LISTEN": "[::]:1"}, (), id="all IPv6 interfaces"),
        pytest.param({"TPUFLEET_LISTEN": "10.0.0.1:1"}, (), id="a network"),
        pytest.param({"TPUFLEET_LISTEN": "fleet:1"}, (), id="a host name"),
        pytest.param({"TPUFLEET_PUBLIC_URL": "https://fleet.example"}, (), id="behind a proxy"),
        pytest.param(TPU_VM, ("tpu-vm",), id="TPU VMs"),
        pytest.param(GKE, ("gke",), id="GKE"),
        pytest.param({**TPU_VM, **GKE}, ("tpu-vm", "gke"), id="both"),
        pytest.param(
            {**TPU_VM, "TPUFLEET_PROVIDERS": "tpu-vm, local"}, ("tpu-vm", "local"), id="listed"
        ),
        pytest.param(
            {"TPUFLEET_LISTEN": "0.0.0.0:1", "TPUFLEET_PROVIDERS": "local"}, ("local",),
            id="listed on a network",
        ),
    ],
)  # fmt: skip
def test_simulated_slices_are_off_unless_listed_where_others_could_run_jobs(
    tmp_path, environ, enabled
):
    settings = config.load(environ, tmp_path)
    assert settings.enabled_providers == enabled
    if enabled:
        assert settings.default_provider == enabled[0]
    else:
        with pytest.raises(BadInput, match="no provider is enabled"):
            settings.default_provider  # noqa: B018


def test_the_default_provider_must_be_enabled(tmp_path):
    settings = config.load({**TPU_VM, "TPUFLEET_PROVIDER": "local"}, tmp_path)
    with pytest.raises(BadInput, match="provider: local is not allowed"):
        settings.default_provider  # noqa: B018


@pytest.mark.parametrize("text", ["tpu_vm", ",", "local,mars"])
def test_enabled_providers_must_exist(tmp_path, text):
    with pytest.raises(BadInput, match="TPUFLEET_PROVIDERS"):
        config.load({"TPUFLEET_PROVIDERS": text}, tmp_path)


def test_a_server_builds_only_the_providers_that_are_enabled(tmp_path):
    pytest.importorskip("google.cloud.tpu_v2")
    public = {"TPUFLEET_PUBLIC_URL": "https://fleet.example.com"}
    environ = {"TPUFLEET_HOME": str(tmp_path), **TPU_VM, **public}
    built = compose.providers(config.load(environ, tmp_path), MemoryStore())
    assert list(built) == ["tpu-vm"]
    with pytest.raises(BadInput, match="gke is enabled but not configured"):
        compose.providers(
            config.load({**environ, "TPUFLEET_PROVIDERS": "gke"}, tmp_path), MemoryStore()
        )


@pytest.mark.parametrize(
    ("environ", "problem"),
    [
        pytest.param({}, None, id="loopback"),
        pytest.param({"TPUFLEET_LISTEN": "0.0.0.0:1"}, "plain HTTP", id="all interfaces"),
        pytest.param({"TPUFLEET_LISTEN": "[::]:1"}, "plain HTTP", id="all IPv6 interfaces"),
        pytest.param({"TPUFLEET_LISTEN": "fleet:1"}, "plain HTTP", id="a host name"),
        pytest.param(
            {"TPUFLEET_LISTEN": "0.0.0.0:1", "TPUFLEET_INSECURE_HTTP": "true"}, None, id="allowed"
        ),
        pytest.param(
            {
                "TPUFLEET_LISTEN": "0.0.0.0:1",
                "TPUFLEET_TLS_CERT": "cert",
                "TPUFLEET_TLS_KEY": "key",
            },
            None, id="TLS",
        ),
        pytest.param({"TPUFLEET_TLS_CERT": "cert"}, "set both", id="no key"),
        pytest.param(
            {"TPUFLEET_TLS_CERT": "cert", "TPUFLEET_TLS_KEY": "none"}, "no such file", id="no file"
        ),
        pytest.param(
            {"TPUFLEET_TLS_CERT": "cert", "TPUFLEET_TLS_KEY": "open"}, "read by other users",
            id="a key that everyone can read",
        ),
    ],
)  # fmt: skip
def test_plain_http_beyond_loopback_must_be_allowed(tmp_path, monkeypatch, environ, problem):
    monkeypatch.chdir(tmp_path)
    for name, mode in (("cert", 0o644), ("key", 0o600), ("open", 0o644)):
        (tmp_path / name).touch()
        (tmp_path / name).chmod(mode)
    settings = config.load(environ, tmp_path)
    if problem is None:
        settings.check_transport()
    else:
        with pytest.raises(BadInput, match=problem):
            settings.check_transport()


@pytest.mark.parametrize("name", ["fleet.db", "token", "secret"])
def test_a_server_does_not_start_on_files_that_others_can_read(tmp_path, name):
    path = tmp_path / name
    path.touch(mode=0o644)
    path.chmod(0o644)
    settings = config.load({"TPUFLEET_HOME": str(tmp_path)}, tmp_path)
    with pytest.raises(BadInput, match=f"{path} can be read by other users; run `chmod 600"):
        control_plane.serve(settings, embedded=False)


def test_the_time_that_a_command_waits_for_an_answer(tmp_path):
    load = lambda text: config.load({"TPUFLEET_REQUEST_TIMEOUT": text}, tmp_path)
    assert config.load({}, tmp_path).request_timeout is None
    assert load("2m").request_timeout == timedelta(minutes=2)
    for wrong in ("soon", "none", "0s"):
        with pytest.raises(BadInput, match="TPUFLEET_REQUEST_TIMEOUT"):
            load(wrong)


def test_the_half_life_of_usage(tmp_path):
    load = lambda text: config.load({"TPUFLEET_FAIR_SHARE_HALF_LIFE": text}, tmp_path)
    assert config.load({}, tmp_path).fair_share_half_life == timedelta(days=7)
    assert load("1d").fair_share_half_life == timedelta(days=1)
    assert load("none").fair_share_half_life is None
    for wrong in ("soon", "1s"):
        with pytest.raises(BadInput, match="TPUFLEET_FAIR_SHARE_HALF_LIFE"):
            load(wrong)


@pytest.mark.parametrize(
    "url, shown",
    [
        ("sqlite:////srv/fleet.db", "sqlite:////srv/fleet.db"),
        ("postgresql://ada@db:5432/fleet", "postgresql://ada@db:5432/fleet"),
        ("postgresql://ada:x@db/fleet", "postgresql://ada:***@db/fleet"),
        ("postgresql://ada:x#?@y@db,db2/fleet", "postgresql://ada:***@db,db2/fleet"),
        ("postgresql:///fleet?host=/run&password=x", "postgresql:///fleet?host=/run&password=***"),
        ("postgresql://[::1]/f?%73slpassword=x&a=b", "postgresql://[::1]/f?%73slpassword=***&a=b"),
    ],
)
def test_the_url_of_a_store_is_shown_without_its_passwords(url, shown):
    assert config.redacted_store(url) == shown


def test_a_section_may_be_a_file_of_its_own(home, tmp_path):
    own = tmp_path / "prices.yaml"
    own.write_text("as_of: 2026-11\nv6e: {spot: 1.1}\n")
    loaded = config.load({"TPUFLEET_PRICES": str(own)}, home)
    assert loaded.prices == {"as_of": "2026-11", "v6e": {"spot": 1.1}}
    with pytest.raises(BadInput, match=r"gone\.yaml: no such file"):
        config.load({"TPUFLEET_PRICES": str(tmp_path / "gone.yaml")}, home)
