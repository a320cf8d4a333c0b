"""`tpu config import`."""

from __future__ import annotations

import json

from tests.views.cli_runner import Tpu


def test_the_data_of_the_former_job_manager_is_imported(tpu: Tpu, tmp_path):
    file = tmp_path / "data.json"
    user = {
        "id": 1,
        "name": "mel",
        "working_dir": {"1": "/home/mel/a", "2": "/home/mel/b"},
        "config_aliases": {"lr": "config.training.learning_rate", "sd": "config.seed"},
        "settings": {"monitor_upd_time": 7, "time_zone": "cn", "extra_settings": {}},
        "job_data": [{"windows_id": 3}],
    }
    file.write_text(
        json.dumps({"users": {"mel": user}, "tpu_aliases": {"v4-32-p2": "kmh-tpuvm-v4-32-2"}})
    )
    result = tpu("config", "import", str(file))
    assert result.exit_code == 0, result.output
    assert "2 settings, 1 config aliases, 1 TPU aliases, 2 folders" in result.stdout
    assert "not imported: 1 job, which ran in tmux" in result.stderr
    assert tpu.ok("config", "get", "time_zone") == "cn\n"
    assert tpu.ok("config", "dir", "get", "2") == "/home/mel/b\n"
    missing = file.with_name("missing.json")
    assert f"{missing}: No such file" in tpu("config", "import", str(missing)).stderr
    for wrong in ("{}", "[]", "no JSON"):
        missing.write_text(wrong)
        assert "no data.json of the former job" in tpu("config", "import", str(missing)).stderr
    assert "pass --as with one of mel" in tpu("config", "import", str(file), "--as", "x").stderr
    refused = tpu("run", "v4-32-p2", "--", "true")
    assert refused.exit_code == 2
    assert "v4-32-p2 is an alias of kmh-tpuvm-v4-32-2" in refused.stderr
    assert "`tpu adopt kmh-tpuvm-v4-32-2 " in refused.stderr
