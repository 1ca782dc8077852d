//! Plots over size, as SVG: one panel per transport, logarithmic axes, solid lines for calomel and dashed lines for raw.

use std::fmt::Write as _;

/// The quantity on the vertical axis: nanoseconds, or bytes per nanosecond.
#[derive(Clone, Copy)]
pub enum Quantity {
    Latency,
    Bandwidth,
}

pub struct Panel {
    pub title: String,
    pub lines: Vec<Line>,
}

pub struct Line {
    name: String,
    raw: bool,
    points: Vec<(f64, f64)>,
}

impl Panel {
    /// Adds a point to the line with this name.
    pub fn add(&mut self, name: String, raw: bool, point: (f64, f64)) {
        match self.lines.iter_mut().find(|line| line.name == name) {
            Some(line) => line.points.push(point),
            None => self.lines.push(Line { name, raw, points: vec![point] }),
        }
    }
}

const WIDTH: f64 = 450.0;
const HEIGHT: f64 = 330.0;
/// Left, right, top and bottom of the axes within a panel.
const MARGIN: [f64; 4] = [70.0, 24.0, 30.0, 46.0];
const COLUMNS: usize = 2;
/// A line and its raw reference have the same colour.
const COLOURS: [&str; 4] = ["#0b6fb8", "#d1495b", "#2e8b57", "#8a5fbf"];

pub fn svg(quantity: Quantity, panels: &[Panel]) -> String {
    let columns = COLUMNS.min(panels.len());
    let (width, height) = (WIDTH * columns as f64, HEIGHT * panels.len().div_ceil(columns) as f64 + 30.0);
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" width=\"{width}\" height=\"{height}\" \
         font-family=\"sans-serif\" font-size=\"11\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
    );
    let heading = match quantity {
        Quantity::Latency => "Round trip of a call over the size of its arguments (median)",
        Quantity::Bandwidth => "Bandwidth of a call that moves bulk data, over its size (median)",
    };
    let _ = writeln!(out, "<text x=\"{}\" y=\"20\" font-size=\"14\" text-anchor=\"middle\">{heading}</text>", width / 2.0);
    // The same axes in every panel, so that transports can be compared.
    let points = || panels.iter().flat_map(|panel| &panel.lines).flat_map(|line| &line.points);
    let x = Axis::around(points().map(|point| point.0), 4.0);
    let y = Axis::around(points().map(|point| point.1), 10.0);
    for (number, panel) in panels.iter().enumerate() {
        let (column, row) = (number % columns, number / columns);
        let _ = writeln!(out, "<g transform=\"translate({},{})\">", WIDTH * column as f64, HEIGHT * row as f64 + 26.0);
        draw(&mut out, quantity, panel, &x, &y);
        out.push_str("</g>\n");
    }
    out.push_str("</svg>\n");
    out
}

/// A logarithmic axis between two powers of `base`.
struct Axis {
    low: f64,
    high: f64,
    base: f64,
}

impl Axis {
    fn around(values: impl Iterator<Item = f64>, base: f64) -> Axis {
        let (mut low, mut high) = (f64::INFINITY, f64::NEG_INFINITY);
        for value in values {
            low = low.min(value.log(base));
            high = high.max(value.log(base));
        }
        // Rounded, so that the inexact logarithm of a power of the base is its exponent.
        let whole = |value: f64| (value * 1e6).round() / 1e6;
        let (low, high) = (whole(low).floor(), whole(high).ceil());
        Axis { low, high: high.max(low + 1.0), base }
    }

    /// From 0 at the lower end to 1 at the upper.
    fn place(&self, value: f64) -> f64 {
        (value.log(self.base) - self.low) / (self.high - self.low)
    }

    fn ticks(&self) -> impl Iterator<Item = f64> {
        (self.low as i32..=self.high as i32).map(|power| self.base.powi(power))
    }
}

fn draw(out: &mut String, quantity: Quantity, panel: &Panel, x: &Axis, y: &Axis) {
    let [left, right, top, bottom] = MARGIN;
    let (across, down) = (WIDTH - left - right, HEIGHT - top - bottom);
    let (at_x, at_y) = (|value: f64| left + across * x.place(value), |value: f64| top + down * (1.0 - y.place(value)));
    let (low, end) = (top + down, left + across);
    let _ = writeln!(out, "<text x=\"{left}\" y=\"{}\" font-size=\"12\" font-weight=\"bold\">{}</text>", top - 8.0, panel.title);
    for tick in x.ticks() {
        let (at, label) = (at_x(tick), super::readable(tick as usize));
        let _ = writeln!(out, "<path d=\"M{at:.1} {top}V{low}\" stroke=\"#e4e4e4\"/>");
        let _ = writeln!(out, "<text x=\"{at:.1}\" y=\"{}\" text-anchor=\"middle\" font-size=\"9\">{label}</text>", low + 14.0);
    }
    for tick in y.ticks() {
        let at = at_y(tick);
        let label = match quantity {
            Quantity::Latency if tick < 1e3 => format!("{tick} ns"),
            Quantity::Latency if tick < 1e6 => format!("{} us", tick / 1e3),
            Quantity::Latency => format!("{} ms", tick / 1e6),
            Quantity::Bandwidth if tick < 1e-3 => format!("{:.0} KB/s", tick * 1e6),
            Quantity::Bandwidth if tick < 1.0 => format!("{:.0} MB/s", tick * 1e3),
            Quantity::Bandwidth => format!("{tick} GB/s"),
        };
        let _ = writeln!(out, "<path d=\"M{left} {at:.1}H{end}\" stroke=\"#e4e4e4\"/>");
        let _ = writeln!(out, "<text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{label}</text>", left - 6.0, at + 4.0);
    }
    let _ = writeln!(out, "<rect x=\"{left}\" y=\"{top}\" width=\"{across}\" height=\"{down}\" fill=\"none\" stroke=\"#666\"/>");
    let _ = writeln!(out, "<text x=\"{}\" y=\"{}\" text-anchor=\"middle\">size</text>", left + across / 2.0, low + 32.0);

    // Labels are placed where no lines are: times start low at the left, bandwidths end high at the right.
    let (from, first) = match quantity {
        Quantity::Latency => (left + 10.0, top + 16.0),
        Quantity::Bandwidth => (end - 125.0, low + 8.0 - 15.0 * panel.lines.len() as f64),
    };
    let mut colour = 0;
    for (number, line) in panel.lines.iter().enumerate() {
        if number > 0 && !line.raw {
            colour += 1;
        }
        let paint = COLOURS[colour % COLOURS.len()];
        let style = if line.raw { "stroke-dasharray=\"5 4\"" } else { "" };
        let path: Vec<String> = line.points.iter().map(|&(x, y)| format!("{:.1},{:.1}", at_x(x), at_y(y))).collect();
        let stroke = format!("stroke=\"{paint}\" stroke-width=\"1.8\" {style}");
        let _ = writeln!(out, "<polyline points=\"{}\" fill=\"none\" {stroke}/>", path.join(" "));
        for point in path.iter().filter(|_| !line.raw) {
            let (x, y) = point.split_once(',').unwrap_or_default();
            let _ = writeln!(out, "<circle cx=\"{x}\" cy=\"{y}\" r=\"2.6\" fill=\"{paint}\"/>");
        }
        let height = first + 15.0 * number as f64;
        let _ = writeln!(out, "<path d=\"M{from} {}h26\" {stroke}/>", height - 4.0);
        let _ = writeln!(out, "<text x=\"{}\" y=\"{height}\">{}</text>", from + 32.0, line.name);
    }
}
