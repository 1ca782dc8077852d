//! The report: a table on stdout, JSON and plots in `target/calomel-bench`.

use std::{
    fmt::Write as _,
    fs, io,
    path::{Path, PathBuf},
    thread,
};

use super::{
    Plan, plot,
    stats::{Series, Summary},
};

/// What one sample measures, which decides how it is printed.
#[derive(Clone, Copy)]
pub enum Unit {
    /// The time of an operation; less is better.
    Time,
    /// The time of one call among many; also shown as a rate.
    Rate,
    /// The time of a transfer of so many bytes; also shown as a bandwidth.
    Bytes(usize),
    /// A count of the named things; less is better.
    Count(&'static str),
}

/// The goal that a figure should reach.
#[derive(Clone, Copy)]
pub enum Goal {
    /// No goal.
    None,
    /// At most so many times the raw time.
    TimeAtMost(f64),
    /// The 99th percentile, at most so many times that of the raw times.
    TailAtMost(f64),
    /// At least so many times the raw speed.
    SpeedAtLeast(f64),
    /// At most so many nanoseconds, or so many of what is counted, independent of the raw side.
    AtMost(f64),
    /// At least so many calls per second, independent of the raw side.
    PerSecond(f64),
    /// Zero in every sample.
    Zero,
}

/// One row of the table.
pub struct Figure {
    name: String,
    unit: Unit,
    ours: Summary,
    raw: Option<(String, Summary)>,
    goal: Goal,
    /// The panel of the plot, the line in it, and the size in bytes.
    place: Option<(String, String, usize)>,
}

impl Figure {
    pub fn new(name: impl Into<String>, unit: Unit, ours: &Series) -> Figure {
        Figure { name: name.into(), unit, ours: ours.summary(), raw: None, goal: Goal::None, place: None }
    }

    /// The reference, and its name.
    pub fn raw(mut self, what: impl Into<String>, raw: &Series) -> Figure {
        self.raw = Some((what.into(), raw.summary()));
        self
    }

    pub fn goal(mut self, goal: Goal) -> Figure {
        self.goal = goal;
        self
    }

    /// The place of the figure in the plot.
    pub fn plotted(mut self, panel: impl Into<String>, line: impl Into<String>, size: usize) -> Figure {
        self.place = Some((panel.into(), line.into(), size));
        self
    }
}

pub struct Report<'a> {
    name: &'static str,
    plan: &'a Plan,
    /// A short name of the references.
    beside: &'static str,
    figures: Vec<Figure>,
    /// What could not be measured, and why.
    skipped: Vec<String>,
}

impl<'a> Report<'a> {
    pub fn new(name: &'static str, plan: &'a Plan) -> Report<'a> {
        Report { name, plan, beside: "raw", figures: Vec::new(), skipped: Vec::new() }
    }

    pub fn beside(mut self, beside: &'static str) -> Report<'a> {
        self.beside = beside;
        self
    }

    pub fn add(&mut self, figure: Figure) {
        let verdict = match figure.reached() {
            Some(false) => "  MISSED",
            _ => "",
        };
        let ratio = figure.ratio().map_or(String::new(), |ratio| format!(", {ratio:.2} x"));
        eprintln!("  {}: {}{ratio}{verdict}", figure.name, cell(&figure.ours, figure.unit));
        self.figures.push(figure);
    }

    pub fn skip(&mut self, line: String) {
        eprintln!("  {line}");
        self.skipped.push(line);
    }

    /// Prints the table, writes the JSON and, if figures are to be plotted, the plot.
    pub fn finish(&self) -> io::Result<()> {
        println!("{}", self.table());
        for line in &self.skipped {
            println!("{line}");
        }
        let (repeated, disturbed) = (self.plan.repeated.get(), self.plan.disturbed.get());
        println!("rounds disturbed by other processes: {repeated} taken again, {disturbed} counted nevertheless");
        // Cargo makes this folder inside of its target folder.
        let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().map_or_else(PathBuf::new, Path::to_owned);
        let folder = target.join("calomel-bench");
        fs::create_dir_all(&folder)?;
        let file = folder.join(format!("{}.json", self.name));
        fs::write(&file, self.json())?;
        println!("written to {}", file.display());
        if let Some(plot) = self.plot() {
            let file = folder.join(format!("{}.svg", self.name));
            fs::write(&file, plot)?;
            println!("plotted to {}", file.display());
        }
        Ok(())
    }

    fn plot(&self) -> Option<String> {
        let mut panels: Vec<plot::Panel> = Vec::new();
        let mut quantity = plot::Quantity::Latency;
        for figure in &self.figures {
            let Some((title, line, size)) = &figure.place else { continue };
            if let Unit::Bytes(_) = figure.unit {
                quantity = plot::Quantity::Bandwidth;
            }
            let at = panels.iter().position(|panel| &panel.title == title).unwrap_or_else(|| {
                panels.push(plot::Panel { title: title.clone(), lines: Vec::new() });
                panels.len() - 1
            });
            let mut point = |name: String, raw: bool, median: f64| {
                let value = match figure.unit {
                    Unit::Bytes(bytes) => bytes as f64 / median,
                    _ => median,
                };
                panels[at].add(name, raw, (*size as f64, value));
            };
            point(format!("{line}, calomel"), false, figure.ours.median);
            if let Some((_, raw)) = &figure.raw {
                point(format!("{line}, raw"), true, raw.median);
            }
        }
        (!panels.is_empty()).then(|| plot::svg(quantity, &panels))
    }

    fn table(&self) -> String {
        let (raw, what) = (format!("{}: median [min, p99]", self.beside), format!("{} is", self.beside));
        let head = ["figure", "calomel: median [min, p99]", &raw, &what, "ratio", "goal", "verdict", "n"];
        let mut rows = vec![head.map(String::from)];
        rows.extend(self.figures.iter().map(Figure::row));
        let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
        let widths: [usize; 8] = std::array::from_fn(width);
        let mut text = format!(
            "\n{}: {} interleaved rounds{}; the ratio is the median of the rounds' ratios\n",
            self.name,
            self.plan.rounds,
            if self.plan.quick { " (quick)" } else { "" },
        );
        for row in &rows {
            let mut line = String::new();
            for (cell, width) in row.iter().zip(widths) {
                let _ = write!(line, "{cell:width$}  ");
            }
            let _ = writeln!(text, "{}", line.trim_end());
        }
        let judged = self.figures.iter().filter_map(Figure::reached);
        let (reached, missed): (Vec<bool>, Vec<bool>) = judged.partition(|&reached| reached);
        let _ = write!(text, "{} goals reached, {} missed", reached.len(), missed.len());
        text
    }

    fn json(&self) -> String {
        let figures: Vec<String> = self.figures.iter().map(Figure::json).collect();
        let skipped: Vec<String> = self.skipped.iter().map(|line| quoted(line)).collect();
        format!(
            "{{\n\"benchmark\": {}, \"version\": {}, \"quick\": {}, \"rounds\": {}, \"cores\": {}, \
             \"repeated_rounds\": {}, \"disturbed_rounds\": {},\n\"skipped\": [{}],\n\"figures\": [\n{}\n]}}\n",
            quoted(self.name),
            quoted(env!("CARGO_PKG_VERSION")),
            self.plan.quick,
            self.plan.rounds,
            thread::available_parallelism().map_or(0, usize::from),
            self.plan.repeated.get(),
            self.plan.disturbed.get(),
            skipped.join(", "),
            figures.join(",\n"),
        )
    }
}

impl Figure {
    /// The ratio of times for a time, of speeds for a rate or a bandwidth; of 99th percentiles where those are judged.
    fn ratio(&self) -> Option<f64> {
        let (_, raw) = self.raw.as_ref()?;
        Some(match (self.goal, self.unit) {
            (Goal::TailAtMost(_), _) => self.ours.tail_ratio_to(raw),
            (_, Unit::Time | Unit::Count(_)) => self.ours.ratio_to(raw),
            (_, Unit::Rate | Unit::Bytes(_)) => raw.ratio_to(&self.ours),
        })
    }

    fn reached(&self) -> Option<bool> {
        match self.goal {
            Goal::None => None,
            Goal::TimeAtMost(limit) | Goal::TailAtMost(limit) => self.ratio().map(|ratio| ratio <= limit),
            Goal::SpeedAtLeast(limit) => self.ratio().map(|ratio| ratio >= limit),
            Goal::AtMost(limit) => Some(self.ours.median <= limit),
            Goal::PerSecond(limit) => Some(1e9 / self.ours.median >= limit),
            Goal::Zero => Some(self.ours.p99 == 0.0),
        }
    }

    fn row(&self) -> [String; 8] {
        let goal = match self.goal {
            Goal::None => "-".into(),
            Goal::TimeAtMost(limit) => format!("<= {limit}"),
            Goal::TailAtMost(limit) => format!("p99 <= {limit}"),
            Goal::SpeedAtLeast(limit) => format!(">= {limit}"),
            Goal::AtMost(limit) => {
                let (divisor, word) = scale(limit, self.unit);
                format!("<= {} {word}", limit / divisor)
            }
            Goal::PerSecond(limit) => format!(">= {} k/s", limit / 1e3),
            Goal::Zero => "0".into(),
        };
        let verdict = self.reached().map_or("-", |reached| if reached { "reached" } else { "MISSED" });
        let (what, raw) = self.raw.as_ref().map_or(("-", "-".into()), |(what, raw)| (what.as_str(), cell(raw, self.unit)));
        let ratio = self.ratio().map_or("-".into(), |ratio| format!("{ratio:.2}"));
        let samples = self.ours.samples.to_string();
        [self.name.clone(), cell(&self.ours, self.unit), raw, what.into(), ratio, goal, verdict.into(), samples]
    }

    fn json(&self) -> String {
        let (unit, bytes) = match self.unit {
            Unit::Time | Unit::Rate => ("ns", None),
            Unit::Bytes(bytes) => ("ns", Some(bytes)),
            Unit::Count(word) => (word, None),
        };
        let (kind, limit) = match self.goal {
            Goal::None => ("none", None),
            Goal::TimeAtMost(limit) => ("time at most", Some(limit)),
            Goal::TailAtMost(limit) => ("p99 at most", Some(limit)),
            Goal::SpeedAtLeast(limit) => ("speed at least", Some(limit)),
            Goal::AtMost(limit) => ("at most", Some(limit)),
            Goal::PerSecond(limit) => ("calls a second at least", Some(limit)),
            Goal::Zero => ("zero", Some(0.0)),
        };
        format!(
            "  {{\"figure\": {}, \"unit\": {}, \"bytes\": {},\n   \"calomel\": {},\n   \"raw\": {},\n   \
             \"raw_is\": {}, \"ratio\": {}, \"goal\": {}, \"limit\": {}, \"reached\": {}}}",
            quoted(&self.name),
            quoted(unit),
            or_null(bytes),
            summary_json(&self.ours),
            or_null(self.raw.as_ref().map(|(_, raw)| summary_json(raw))),
            or_null(self.raw.as_ref().map(|(what, _)| quoted(what))),
            or_null(self.ratio().map(|ratio| format!("{ratio:.4}"))),
            quoted(kind),
            or_null(limit),
            or_null(self.reached()),
        )
    }
}

fn summary_json(summary: &Summary) -> String {
    let rounds: Vec<String> = summary.rounds.iter().map(|median| format!("{median:.1}")).collect();
    format!(
        "{{\"median\": {:.1}, \"min\": {:.1}, \"p99\": {:.1}, \"samples\": {}, \"round_medians\": [{}]}}",
        summary.median,
        summary.min,
        summary.p99,
        summary.samples,
        rounds.join(", "),
    )
}

/// The divisor for a value, and its unit.
fn scale(value: f64, unit: Unit) -> (f64, &'static str) {
    match unit {
        Unit::Count(word) => (1.0, word),
        _ if value < 1e3 => (1.0, "ns"),
        _ if value < 1e6 => (1e3, "us"),
        _ => (1e6, "ms"),
    }
}

fn cell(summary: &Summary, unit: Unit) -> String {
    let Summary { median, min, p99, .. } = *summary;
    let (divisor, word) = scale(median, unit);
    let [median_text, min_text, p99_text] = [median, min, p99].map(|value| short(value / divisor));
    let times = format!("{median_text} {word} [{min_text}, {p99_text}]");
    match unit {
        Unit::Time | Unit::Count(_) => times,
        Unit::Rate => format!("{times} = {} k/s", short(1e6 / median)),
        Unit::Bytes(bytes) => format!("{times} = {} GB/s", short(bytes as f64 / median)),
    }
}

/// Three digits, or the whole number.
fn short(value: f64) -> String {
    let places = match value {
        0.0 => 0,
        v if v < 10.0 => 2,
        v if v < 100.0 => 1,
        _ => 0,
    };
    format!("{value:.places$}")
}

fn or_null(value: Option<impl ToString>) -> String {
    value.map_or("null".into(), |value| value.to_string())
}

/// Names contain no characters that need an escape but these two.
fn quoted(text: &str) -> String {
    format!("\"{}\"", text.replace('\\', "\\\\").replace('"', "\\\""))
}
