"""A report page: one self-contained HTML file, built from sections.

    write_html(path, "A small Llama on four processes", [summary_section(cards), memory_section(comparison), ...])

Nothing is fetched from anywhere and nothing is scripted; the page follows the reader's light or dark scheme.
"""

from shardwise.report.page.document import Section, html_report, write_html
from shardwise.report.page.memory_sections import memory_section, zero_section
from shardwise.report.page.run_sections import (
    Card,
    comparison_cards,
    loss_card,
    loss_section,
    notes_section,
    parameters_fact,
    run_section,
    summary_section,
)
from shardwise.report.page.timeline_section import timeline_section
from shardwise.report.page.traffic_sections import ledger_section, transport_section

__all__ = [
    "Card",
    "Section",
    "comparison_cards",
    "html_report",
    "ledger_section",
    "loss_card",
    "loss_section",
    "memory_section",
    "notes_section",
    "parameters_fact",
    "run_section",
    "summary_section",
    "timeline_section",
    "transport_section",
    "write_html",
    "zero_section",
]
