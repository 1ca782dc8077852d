//! What `calomel top` draws: text for scripts, and a screen that is redrawn.

use std::collections::{BTreeMap, VecDeque};
use std::fmt::Write;

use ratatui::Frame;
use ratatui::layout::{Alignment, Constraint, Layout};
use ratatui::style::{Style, Stylize};
use ratatui::text::Line;
use ratatui::widgets::{Block, Cell, Paragraph, Row, Sparkline, Table};

use super::interval::{Interval, Order, PeerRates, ProcedureRates};
use crate::units;

/// Intervals that are kept for the chart; a terminal is hardly wider.
const KEPT: usize = 400;
/// Most peers that are shown; there may be thousands.
const PEERS: usize = 8;

const PROCEDURES: [&str; 8] = ["", "procedure", "provider", "calls", "p50", "p99", "errors", "all calls"];
const PEER_COLUMNS: [&str; 6] = ["peer", "over", "calls", "sent", "received", "in progress"];

/// Text that a peer has sent: a terminal must not take it for commands.
fn printable(text: &str) -> String {
    let escape = |c: char| if c.is_control() { c.escape_default().to_string() } else { c.to_string() };
    text.chars().map(escape).collect()
}

fn listed(counts: &BTreeMap<String, u64>) -> String {
    if counts.is_empty() {
        return "none".to_owned();
    }
    counts.iter().map(|(name, count)| format!("{name} {count}")).collect::<Vec<_>>().join(", ")
}

fn uptime(seconds: f64) -> String {
    let seconds = seconds as u64;
    let (days, hours, minutes) = (seconds / 86_400, seconds / 3600 % 24, seconds / 60 % 60);
    match seconds {
        86_400.. => format!("{days} d {hours} h"),
        3600.. => format!("{hours} h {minutes} min"),
        60.. => format!("{minutes} min {} s", seconds % 60),
        _ => format!("{seconds} s"),
    }
}

/// What is true of the whole engine, in a few lines.
fn summary(interval: &Interval) -> Vec<String> {
    let of = interval;
    let over = of.transport.as_ref().map_or_else(String::new, |transport| format!(" over {transport}"));
    let connections: Vec<String> = of.connections.iter().map(|(transport, count)| format!("{count} {transport}")).collect();
    let connections = if connections.is_empty() { "none".to_owned() } else { connections.join(", ") };
    let mut lines = vec![
        format!("{}{over}: process {}, engine {}, up {}", printable(&of.address), of.process, of.engine, uptime(of.uptime)),
        format!(
            "handled {}   called {}   sent {}   received {}   transferred {}",
            units::rate(of.requests),
            units::rate(of.calls),
            units::bandwidth(of.sent_bytes),
            units::bandwidth(of.received_bytes),
            units::bandwidth(of.transferred_bytes),
        ),
        format!(
            "peers {}   connections {connections}   handling {}   waiting for peers {}   exposed {} regions, {}",
            of.peers.len(),
            of.handling,
            of.waiting,
            of.exposed_regions,
            units::bytes(of.exposed_bytes),
        ),
        format!("limits reached: {}   refusals: {}", listed(&of.limits), listed(&of.refusals)),
    ];
    if !of.measured {
        lines.push("The engine does not measure calls and handlers: `EngineBuilder::statistics(false)`.".to_owned());
    }
    if of.left_out > 0 {
        lines.push(format!("{} procedures and peers with few calls were left out by the engine.", of.left_out));
    }
    lines
}

fn procedure_cells(of: &ProcedureRates) -> [String; 8] {
    let time = |time: Option<u64>| time.map_or_else(|| "-".to_owned(), |ns| units::time(ns as f64));
    let parent = of.parent.as_ref().map_or_else(String::new, |parent| format!(" (by {parent})"));
    let errors = if of.errors > 0.0 { units::rate(of.errors) } else { of.all_errors.to_string() };
    [
        if of.handled { "handles" } else { "calls" }.to_owned(),
        printable(&(of.procedure.clone() + &parent)),
        of.provider.to_string(),
        units::rate(of.calls),
        time(of.p50),
        time(of.p99),
        errors,
        of.all_calls.to_string(),
    ]
}

fn peer_cells(of: &PeerRates) -> [String; 6] {
    [
        printable(&of.address),
        of.transport.clone().unwrap_or_else(|| "-".to_owned()),
        units::rate(of.calls),
        units::bandwidth(of.sent_bytes),
        units::bandwidth(of.received_bytes),
        format!("{} handled, {} waiting", of.handling, of.waiting),
    ]
}

/// As plain text.
pub(super) fn text(interval: &Interval) -> String {
    let mut text = summary(interval).join("\n") + "\n\n";
    let mut line = |cells: &[String; 8]| {
        let [kind, procedure, provider, calls, p50, p99, errors, all] = cells;
        // Writing to a string can't fail.
        let _ = writeln!(text, "{kind:<8} {procedure:<32} {provider:>8} {calls:>11} {p50:>9} {p99:>9} {errors:>9} {all:>12}");
    };
    line(&PROCEDURES.map(str::to_owned));
    interval.procedures.iter().for_each(|procedure| line(&procedure_cells(procedure)));
    text.push('\n');
    let mut line = |[peer, over, calls, sent, received, now]: &[String; 6]| {
        let _ = writeln!(text, "{peer:<41} {over:>8} {calls:>11} {sent:>9} {received:>9} {now}");
    };
    line(&PEER_COLUMNS.map(str::to_owned));
    interval.peers.iter().for_each(|peer| line(&peer_cells(peer)));
    text
}

/// What the terminal shows.
pub(super) struct Screen {
    address: String,
    order: Order,
    latest: Option<Interval>,
    /// Why there is nothing newer.
    trouble: Option<String>,
    /// Calls per second in both directions, the newest last.
    history: VecDeque<u64>,
}

impl Screen {
    pub(super) fn new(address: &str, order: Order) -> Screen {
        Screen { address: address.to_owned(), order, latest: None, trouble: None, history: VecDeque::new() }
    }

    pub(super) fn update(&mut self, mut interval: Interval) {
        self.order.sort(&mut interval.procedures);
        self.history.push_back((interval.calls + interval.requests).round() as u64);
        self.history.drain(..self.history.len().saturating_sub(KEPT));
        self.trouble = None;
        self.latest = Some(interval);
    }

    /// The engine is there, and there is nothing to compare its first figures with.
    pub(super) fn connected(&mut self) {
        self.trouble = None;
    }

    /// The peer does not answer. Its last figures stay.
    pub(super) fn lost(&mut self, reason: &str) {
        self.history.push_back(0);
        self.trouble = Some(printable(reason));
    }

    pub(super) fn reorder(&mut self) {
        self.order = self.order.next();
        if let Some(latest) = &mut self.latest {
            self.order.sort(&mut latest.procedures);
        }
    }

    pub(super) fn draw(&self, frame: &mut Frame<'_>) {
        let mut lines: Vec<Line<'_>> = match &self.latest {
            Some(latest) => summary(latest).into_iter().map(Line::from).collect(),
            None => vec![Line::from(format!("{}: the first interval has not passed yet", self.address))],
        };
        lines[0] = lines[0].clone().bold();
        if let Some(trouble) = &self.trouble {
            lines.push(Line::from(format!("LOST, trying again: {trouble}")).red().bold());
        }
        let peers = self.latest.as_ref().map_or(0, |latest| latest.peers.len().min(PEERS));
        let [top, chart, procedures, peer_list, foot] = Layout::vertical([
            Constraint::Length(lines.len() as u16),
            Constraint::Length(5),
            Constraint::Min(3),
            Constraint::Length(if peers > 0 { peers as u16 + 2 } else { 0 }),
            Constraint::Length(1),
        ])
        .areas(frame.area());
        frame.render_widget(Paragraph::new(lines), top);

        let visible = self.history.len().saturating_sub(usize::from(chart.width));
        let data: Vec<u64> = self.history.iter().skip(visible).copied().collect();
        let most = data.iter().copied().max().unwrap_or(0);
        let title = format!(" calls per second, in both directions; at most {} ", units::rate(most as f64));
        let block = Block::new().borders(ratatui::widgets::Borders::TOP).title(title);
        frame.render_widget(Sparkline::default().block(block).data(&data).max(most.max(1)), chart);

        let Some(latest) = &self.latest else {
            return frame.render_widget(self.foot(), foot);
        };
        let widths = [7, 20, 8, 10, 8, 8, 8, 10].map(Constraint::Length);
        let widths: Vec<Constraint> =
            widths.into_iter().enumerate().map(|(index, width)| if index == 1 { Constraint::Fill(1) } else { width }).collect();
        let rows = latest.procedures.iter().map(|procedure| {
            let style = if procedure.errors > 0.0 { Style::new().red() } else { Style::new() };
            row(procedure_cells(procedure), 2).style(style)
        });
        frame.render_widget(Table::new(rows, widths).header(row(PROCEDURES.map(str::to_owned), 2).reversed()), procedures);
        let widths = [Constraint::Fill(1)].into_iter().chain([6, 10, 9, 9, 26].map(Constraint::Length));
        let rows = latest.peers.iter().take(peers).map(|peer| row(peer_cells(peer), 1));
        let peers = Table::new(rows, widths).header(row(PEER_COLUMNS.map(str::to_owned), 1).reversed());
        frame.render_widget(peers.block(Block::new().borders(ratatui::widgets::Borders::TOP)), peer_list);
        frame.render_widget(self.foot(), foot);
    }

    fn foot(&self) -> Line<'static> {
        Line::from(format!("q quit   s order: {}", format!("{:?}", self.order).to_lowercase())).dim()
    }
}

/// A row whose first columns are texts, and whose others are figures.
fn row<const N: usize>(cells: [String; N], texts: usize) -> Row<'static> {
    let aligned = |(index, text): (usize, String)| {
        let alignment = if index < texts { Alignment::Left } else { Alignment::Right };
        Cell::from(Line::from(text).alignment(alignment))
    };
    Row::new(cells.into_iter().enumerate().map(aligned))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_peer_sends_is_no_command_to_the_terminal() {
        assert_eq!(printable("a\u{1b}[2Jb\n"), "a\\u{1b}[2Jb\\n");
    }

    #[test]
    fn uptimes_have_two_units() {
        assert_eq!([5.9, 61.0, 7260.0, 90_000.0].map(uptime), ["5 s", "1 min 1 s", "2 h 1 min", "1 d 1 h"]);
    }
}
