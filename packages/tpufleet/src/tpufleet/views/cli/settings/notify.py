"""`tpu notify`: where messages about your jobs go."""

from __future__ import annotations

import time

import click

from tpufleet.errors import FleetError
from tpufleet.model.api_types import NewChannel
from tpufleet.model.people.notifications import (
    DEFAULT_EVENTS,
    ChannelKind,
    Delivery,
    DeliveryState,
    NotifyOn,
)
from tpufleet.views import text
from tpufleet.views.cli import connection, output
from tpufleet.views.cli.output import example, json_option

TEST_SECONDS = 15.0
POLL_SECONDS = 0.3
_COLOURS = {DeliveryState.SENT: text.GOOD, DeliveryState.FAILED: text.BAD}


@click.group(
    cls=output.CommandGroup,
    epilog="\b\nExamples:\n  tpu notify\n  tpu notify add team --slack "
    "https://hooks.slack.com/services/…\n"
    "  tpu notify add mail --email me@example.org --on failure\n",
)
@json_option
def notify() -> None:
    """List your channels: where messages about your jobs go.

    A channel gets a message when a job ends or fails, when a job recovers again and again, and
    when a budget of yours is nearly or wholly spent. The job field `notify` chooses channels for
    one job.
    """
    with connection.connect() as client:
        channels = client.channels()
    output.print_table(
        ("CHANNEL", "KIND", "TO", "ON"),
        ((each.name, each.kind.value, each.target, ", ".join(each.on)) for each in channels),
        output.none_yet("channels", "tpu notify add NAME --slack URL|--webhook URL|--email TO"),
        value={"channels": channels},
    )


@notify.command(
    epilog="\b\nExamples:\n  tpu notify add team --slack https://hooks.slack.com/services/…\n"
    "  tpu notify add ci --webhook https://ci.example.org/tpu --on end\n"
    "  tpu notify add mail --email me@example.org --on failure --on budget\n"
)
@click.argument("name")
@click.option("--webhook", metavar="URL", help="POST signed JSON to this URL.")
@click.option("--slack", metavar="URL", help="Incoming webhook of Slack, or a compatible one.")
@click.option("--email", metavar="ADDRESS", help="Send e-mail.")
@output.repeatable(
    "--on",
    "events",
    type=click.Choice([each.value for each in NotifyOn]),
    help=f"Only these events. Repeatable (default: {', '.join(DEFAULT_EVENTS)}).",
)
@json_option
def add(
    name: str,
    webhook: str | None,
    slack: str | None,
    email: str | None,
    events: tuple[str, ...],
) -> None:
    """Add the channel NAME, or replace it.

    URLs are kept encrypted and never shown again. The server signs what it sends to a webhook with
    a key that is printed once.
    """
    given = {ChannelKind.WEBHOOK: webhook, ChannelKind.SLACK: slack, ChannelKind.EMAIL: email}
    output.require_one({f"--{kind}": address for kind, address in given.items()})
    ((kind, address),) = ((kind, address) for kind, address in given.items() if address)
    on = tuple(NotifyOn(each) for each in events) or DEFAULT_EVENTS
    with connection.connect() as client:
        created = client.put_channel(name, NewChannel(kind=kind, address=address, on=on))
    message = f"added {name}: {kind} to {created.channel.target}, on {', '.join(on)}"
    if created.signing_key:
        message += f"\nsigning key, shown only now: {created.signing_key}"
    output.print_result(created, f"{message}\n  next: tpu notify test {name}")


@notify.command(epilog=example("tpu notify delete team"))
@click.argument("name")
@json_option
def delete(name: str) -> None:
    """Delete the channel NAME."""
    with connection.connect() as client:
        deleted = client.delete_channel(name)
    output.print_deleted(deleted, name)


@notify.command(epilog=example("tpu notify test team"))
@click.argument("name")
@json_option
def test(name: str) -> None:
    """Send a test message to the channel NAME, and report how it went."""
    deadline = time.monotonic() + TEST_SECONDS
    with connection.connect() as client:
        sent = client.test_channel(name)
        while sent.state is DeliveryState.PENDING and not sent.tries:
            if time.monotonic() > deadline:
                break
            time.sleep(POLL_SECONDS)
            sent = next(each for each in client.deliveries() if each.id == sent.id)
    if sent.state is DeliveryState.SENT:
        output.print_result(sent, f"sent to {name}")
    elif sent.error:
        raise FleetError(f"cannot send to {name}: {sent.error}{_next(sent)}")
    else:
        output.print_result(sent, f"queued for {name}\n  next: tpu notify history")


def _next(delivery: Delivery) -> str:
    if delivery.state is DeliveryState.FAILED:
        return "\n  next: correct it with `tpu notify add`"
    return f"\n  next: retrying at {text.local_time(delivery.due_at)}; see `tpu notify history`"


@notify.command(epilog=example("tpu notify history"))
@json_option
def history() -> None:
    """List the messages of the last 7 days, newest first."""
    with connection.connect() as client:
        deliveries = client.deliveries()
    output.print_table(
        ("WHEN", "CHANNEL", "STATE", "TRIES", "MESSAGE"),
        (
            (
                text.age(each.created_at),
                each.channel,
                (each.state.value, _COLOURS.get(each.state, "")),
                str(each.tries),
                f"{each.subject} ({each.error})" if each.error else each.subject,
            )
            for each in deliveries
        ),
        "no messages in the last 7 days",
        value={"deliveries": deliveries},
    )
