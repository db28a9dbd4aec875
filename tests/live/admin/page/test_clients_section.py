"""The table of clients on the status page."""

from __future__ import annotations

from gorgo.live.admin.page.clients_section import CLIENTS_SHOWN, clients_section
from gorgo.live.telemetry.client_usage import ClientRow
from tests.live.admin.page.made import status


def test_without_keys_there_is_no_table() -> None:
    assert "".join(clients_section(status())) == ""


def test_each_client_is_a_row_and_429s_stand_out() -> None:
    clients = [ClientRow("<b>", 12, 45_678, 0), ClientRow("team-b", 3, 90, 2)]
    (html,) = clients_section(status(clients=clients))
    assert "<h2>Clients</h2>" in html
    assert "&lt;b&gt;" in html
    assert "<td>45.7k</td><td>0</td>" in html
    assert '<td class="bad">2</td>' in html


def test_only_so_many_clients_are_shown() -> None:
    (html,) = clients_section(status(clients=[ClientRow(f"c{n}", 1, 1, 0) for n in range(CLIENTS_SHOWN + 5)]))
    assert html.count('scope="row"') == CLIENTS_SHOWN
