//! A report of `calomel bench` as one page of HTML: plots in SVG, and a table.

use std::fmt::Write;

use crate::bench::{Report, Row, What};
use crate::units;

const STYLE: &str = "body{font:15px/1.5 system-ui,sans-serif;max-width:62rem;margin:2rem auto;padding:0 1rem;color:#1b1f24}\
table{border-collapse:collapse;width:100%}th,td{text-align:right;padding:.2rem .6rem;border-bottom:1px solid #d8dee4}\
th:nth-child(-n+2),td:nth-child(-n+2){text-align:left}svg{width:100%;height:auto}.grid{stroke:#d8dee4}\
text{font:12px system-ui,sans-serif;fill:#57606a}.plots{display:grid;grid-template-columns:1fr 1fr;gap:1rem}\
@media(max-width:48rem){.plots{grid-template-columns:1fr}}";

/// Colours that people with any colour vision can tell apart; dashes tell transports apart where there are no colours.
const LINES: [(&str, &str); 4] = [("#0072b2", ""), ("#d55e00", "6 3"), ("#009e73", "2 3"), ("#cc79a7", "8 3 2 3")];

pub(crate) fn page(report: &Report) -> String {
    let mut page = format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>calomel bench</title><style>{STYLE}</style></head><body>\n\
         <h1>calomel bench</h1>\n<p>calomel {}, Linux {}, {} processors. Medians; a sample is one operation. \
         Both axes are logarithmic, the horizontal one is the size; a point tells its figure when the pointer rests on it.</p>\n<div class=\"plots\">\n",
        escaped(&report.calomel),
        escaped(&report.kernel),
        report.processors,
    );
    let time = |row: &Row| row.times.median as f64;
    let bandwidth = |row: &Row| row.size as f64 * 1e9 / row.times.median.max(1) as f64;
    page += &plot(report, "Time of a call with arguments", What::Arguments, &time, &units::time);
    page += &plot(report, "Bandwidth of a call with arguments", What::Arguments, &bandwidth, &units::bandwidth);
    page += &plot(report, "Bandwidth of a call + pull", What::Pull, &bandwidth, &units::bandwidth);
    page += &plot(report, "Bandwidth of a call + push", What::Push, &bandwidth, &units::bandwidth);
    page += "</div>\n<table>\n<tr><th></th><th></th><th>min</th><th>median</th><th>p90</th><th>p99</th><th>max</th><th>speed</th></tr>\n";
    for row in &report.rows {
        let times = [row.times.min, row.times.median, row.times.p90, row.times.p99, row.times.max];
        let cells: String = times.iter().map(|ns| format!("<td>{}</td>", units::time(*ns as f64))).collect();
        // Writing to a string can't fail.
        let _ = writeln!(
            page,
            "<tr><td>{}</td><td>{}</td>{cells}<td>{}</td></tr>",
            escaped(&row.transport),
            row.label(),
            row.speed()
        );
    }
    page + "</table>\n</body></html>\n"
}

/// Text from a file, which may have been changed by hand.
fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

const WIDTH: f64 = 480.0;
const HEIGHT: f64 = 320.0;
const LEFT: f64 = 70.0;
const RIGHT: f64 = 28.0;
const TOP: f64 = 52.0;
/// Where the names of the transports stand, and how far from each other.
const LEGEND: f64 = 36.0;
const LEGEND_STEP: f64 = 84.0;
/// The least distance between labels of the horizontal axis: that of `256 KiB`, with some space.
const LABEL_STEP: f64 = 56.0;
const BOTTOM: f64 = 34.0;

/// An axis with logarithmic scale, over whole powers of its base.
struct Axis {
    base: f64,
    first: f64,
    last: f64,
    from: f64,
    to: f64,
}

impl Axis {
    fn new(values: impl Iterator<Item = f64>, base: f64, from: f64, to: f64) -> Option<Axis> {
        let (low, high) = values.map(|value| value.max(1.0).log(base)).fold(None, |range: Option<(f64, f64)>, value| {
            Some(range.map_or((value, value), |(low, high)| (low.min(value), high.max(value))))
        })?;
        let first = low.floor();
        Some(Axis { base, first, last: high.ceil().max(first + 1.0), from, to })
    }

    fn at(&self, value: f64) -> f64 {
        let share = (value.max(1.0).log(self.base) - self.first) / (self.last - self.first);
        self.from + share * (self.to - self.from)
    }

    fn ticks(&self) -> impl Iterator<Item = f64> {
        let (base, first) = (self.base, self.first);
        (0..=(self.last - self.first) as i32).map(move |n| base.powf(first + f64::from(n)))
    }
}

/// A plot over the size, with a line for each transport. Nothing where there are no rows.
fn plot(report: &Report, title: &str, what: What, value: &dyn Fn(&Row) -> f64, unit: &dyn Fn(f64) -> String) -> String {
    let rows: Vec<&Row> = report.rows.iter().filter(|row| row.what == what).collect();
    let x = Axis::new(rows.iter().map(|row| row.size as f64), 4.0, LEFT, WIDTH - RIGHT);
    let y = Axis::new(rows.iter().map(|row| value(row)), 10.0, HEIGHT - BOTTOM, TOP);
    let (Some(x), Some(y)) = (x, y) else { return String::new() };
    let mut svg = format!(
        "<svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-label=\"{title}\">\n<text x=\"{LEFT}\" y=\"16\" style=\"font-weight:600\">{title}</text>\n"
    );
    let (right, bottom) = (WIDTH - RIGHT, HEIGHT - BOTTOM);
    // Writing to a string can't fail.
    for tick in y.ticks() {
        let (at, label) = (y.at(tick), unit(tick));
        let _ = writeln!(svg, "<line class=\"grid\" x1=\"{LEFT}\" x2=\"{right}\" y1=\"{at:.1}\" y2=\"{at:.1}\"/>");
        let _ = writeln!(svg, "<text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{label}</text>", LEFT - 6.0, at + 4.0);
    }
    let mut labelled = f64::NEG_INFINITY;
    for tick in x.ticks() {
        let (at, label) = (x.at(tick), units::size(tick as usize));
        let _ = writeln!(svg, "<line class=\"grid\" x1=\"{at:.1}\" x2=\"{at:.1}\" y1=\"{TOP}\" y2=\"{bottom}\"/>");
        if at < labelled + LABEL_STEP {
            continue;
        }
        labelled = at;
        let _ = writeln!(svg, "<text x=\"{at:.1}\" y=\"{}\" text-anchor=\"middle\">{label}</text>", bottom + 18.0);
    }
    let mut transports: Vec<&str> = Vec::new();
    for row in &rows {
        if !transports.contains(&row.transport.as_str()) {
            transports.push(&row.transport);
        }
    }
    for (index, transport) in transports.into_iter().enumerate() {
        let (colour, dashes) = LINES[index % LINES.len()];
        let own = || rows.iter().filter(|row| row.transport == transport);
        let points: Vec<String> = own().map(|row| format!("{:.1},{:.1}", x.at(row.size as f64), y.at(value(row)))).collect();
        let points = points.join(" ");
        let _ = writeln!(
            svg,
            "<polyline fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\" stroke-dasharray=\"{dashes}\" points=\"{points}\"/>"
        );
        for row in own() {
            let (cx, cy, text) = (x.at(row.size as f64), y.at(value(row)), unit(value(row)));
            let _ = writeln!(
                svg,
                "<circle cx=\"{cx:.1}\" cy=\"{cy:.1}\" r=\"3\" fill=\"{colour}\"><title>{}: {text}</title></circle>",
                units::size(row.size)
            );
        }
        let (at, end) = (LEFT + LEGEND_STEP * index as f64, LEFT + LEGEND_STEP * index as f64 + 30.0);
        let line = LEGEND - 4.0;
        let _ = writeln!(
            svg,
            "<line x1=\"{at}\" x2=\"{end}\" y1=\"{line}\" y2=\"{line}\" stroke=\"{colour}\" stroke-width=\"2\" stroke-dasharray=\"{dashes}\"/>"
        );
        let _ = writeln!(svg, "<text x=\"{}\" y=\"{LEGEND}\" style=\"fill:{colour}\">{}</text>", end + 6.0, escaped(transport));
    }
    svg + "</svg>\n"
}
