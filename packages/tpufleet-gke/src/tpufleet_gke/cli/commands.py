"""The commands of this distribution, for `tpu --help`."""

from __future__ import annotations

from tpufleet.views.cli.registry import CLUSTER, LazyCommand

CLI = "tpufleet_gke.cli"
COMMANDS = {
    "Operators": {
        "cluster": LazyCommand("Create GKE environments; run one here.", CLUSTER),
        "provisioner": LazyCommand(
            "Create node pools for JobSets.", f"{CLI}.provisioner:provisioner"
        ),
    },
}
CLUSTER_COMMANDS = {
    "init": LazyCommand("Write a commented cluster.yaml.", f"{CLI}.cluster_environment:init"),
    "plan": LazyCommand(
        "Show what apply would change, with the cost per hour.", f"{CLI}.cluster_environment:plan"
    ),
    "apply": LazyCommand("Create or change the environment.", f"{CLI}.cluster_environment:apply"),
    "render": LazyCommand(
        "Write manifests, Helm values and Cloud Build pipelines.", f"{CLI}.cluster_addons:render"
    ),
    "install": LazyCommand("Install add-ons and queues.", f"{CLI}.cluster_addons:install"),
    "doctor": LazyCommand("Check add-ons and queues.", f"{CLI}.cluster_addons:doctor"),
    "example": LazyCommand("Print the JobSet of an example.", f"{CLI}.cluster_addons:example"),
    "destroy": LazyCommand("Delete the environment.", f"{CLI}.cluster_environment:destroy"),
}
