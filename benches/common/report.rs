//! The report: a table for people on stdout, JSON for plots in `target/calomel-bench`.

use std::{
    fmt::Write as _,
    fs, io,
    path::{Path, PathBuf},
    thread,
};

use super::{
    Plan,
    stats::{Series, Summary},
};

/// What one sample stands for, and so how it reads best.
#[derive(Clone, Copy)]
pub enum Unit {
    /// The time of an operation; less is better.
    Time,
    /// The time of one call among many; shown as a rate too.
    Rate,
    /// The time in which so many bytes moved; shown as a bandwidth too.
    Bytes(usize),
    /// How many of what the word says; less is better.
    Count(&'static str),
}

/// What a figure has to reach for now.
#[derive(Clone, Copy)]
pub enum Goal {
    /// Not judged.
    None,
    /// So many times the raw time at most.
    TimeAtMost(f64),
    /// So many times the raw speed at least.
    SpeedAtLeast(f64),
    /// Nothing, in every sample.
    Zero,
}

struct Figure {
    name: String,
    unit: Unit,
    ours: Summary,
    raw: Option<Summary>,
    goal: Goal,
}

pub struct Report<'a> {
    name: &'static str,
    plan: &'a Plan,
    figures: Vec<Figure>,
}

impl Report<'_> {
    pub fn new<'a>(name: &'static str, plan: &'a Plan) -> Report<'a> {
        Report { name, plan, figures: Vec::new() }
    }

    pub fn add(&mut self, name: impl Into<String>, unit: Unit, ours: &Series, raw: Option<&Series>, goal: Goal) {
        let figure = Figure { name: name.into(), unit, ours: ours.summary(), raw: raw.map(Series::summary), goal };
        eprintln!("  {}: {}", figure.name, cell(&figure.ours, unit));
        self.figures.push(figure);
    }

    /// Prints the table and writes the JSON.
    pub fn finish(&self) -> io::Result<()> {
        println!("{}", self.table());
        let (repeated, disturbed) = (self.plan.repeated.get(), self.plan.disturbed.get());
        println!("rounds disturbed by other processes: {repeated} taken again, {disturbed} counted nevertheless");
        // Cargo makes this folder, inside of its target folder, wherever that is.
        let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().map_or_else(PathBuf::new, Path::to_owned);
        let folder = target.join("calomel-bench");
        fs::create_dir_all(&folder)?;
        let file = folder.join(format!("{}.json", self.name));
        fs::write(&file, self.json())?;
        println!("written to {}", file.display());
        Ok(())
    }

    fn table(&self) -> String {
        let mut rows = vec![
            ["figure", "calomel: median [min, p99]", "raw: median [min, p99]", "ratio", "goal", "verdict", "samples"]
                .map(String::from),
        ];
        rows.extend(self.figures.iter().map(Figure::row));
        let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
        let widths: [usize; 7] = std::array::from_fn(width);
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
        format!(
            "{{\n\"benchmark\": {}, \"version\": {}, \"quick\": {}, \"rounds\": {}, \"cores\": {}, \
             \"repeated_rounds\": {}, \"disturbed_rounds\": {},\n\"figures\": [\n{}\n]}}\n",
            quoted(self.name),
            quoted(env!("CARGO_PKG_VERSION")),
            self.plan.quick,
            self.plan.rounds,
            thread::available_parallelism().map_or(0, usize::from),
            self.plan.repeated.get(),
            self.plan.disturbed.get(),
            figures.join(",\n"),
        )
    }
}

impl Figure {
    /// Of times for a time, of speeds for a rate or a bandwidth.
    fn ratio(&self) -> Option<f64> {
        let raw = self.raw.as_ref()?;
        Some(match self.unit {
            Unit::Time | Unit::Count(_) => self.ours.ratio_to(raw),
            Unit::Rate | Unit::Bytes(_) => raw.ratio_to(&self.ours),
        })
    }

    fn reached(&self) -> Option<bool> {
        match self.goal {
            Goal::None => None,
            Goal::TimeAtMost(limit) => self.ratio().map(|ratio| ratio <= limit),
            Goal::SpeedAtLeast(limit) => self.ratio().map(|ratio| ratio >= limit),
            Goal::Zero => Some(self.ours.p99 == 0.0),
        }
    }

    fn row(&self) -> [String; 7] {
        [
            self.name.clone(),
            cell(&self.ours, self.unit),
            self.raw.as_ref().map_or("-".into(), |raw| cell(raw, self.unit)),
            self.ratio().map_or("-".into(), |ratio| format!("{ratio:.2}")),
            match self.goal {
                Goal::None => "-".into(),
                Goal::TimeAtMost(limit) => format!("<= {limit}"),
                Goal::SpeedAtLeast(limit) => format!(">= {limit}"),
                Goal::Zero => "0".into(),
            },
            self.reached().map_or("-", |reached| if reached { "reached" } else { "MISSED" }).into(),
            self.ours.samples.to_string(),
        ]
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
            Goal::SpeedAtLeast(limit) => ("speed at least", Some(limit)),
            Goal::Zero => ("zero", Some(0.0)),
        };
        format!(
            "  {{\"figure\": {}, \"unit\": {}, \"bytes\": {},\n   \"calomel\": {},\n   \"raw\": {},\n   \
             \"ratio\": {}, \"goal\": {}, \"limit\": {}, \"reached\": {}}}",
            quoted(&self.name),
            quoted(unit),
            or_null(bytes),
            summary_json(&self.ours),
            or_null(self.raw.as_ref().map(summary_json)),
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

fn cell(summary: &Summary, unit: Unit) -> String {
    let Summary { median, min, p99, .. } = *summary;
    let (divisor, word) = match unit {
        Unit::Count(word) => (1.0, word),
        _ if median < 1e3 => (1.0, "ns"),
        _ if median < 1e6 => (1e3, "us"),
        _ => (1e6, "ms"),
    };
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

/// Names hold nothing that would need an escape beyond these two.
fn quoted(text: &str) -> String {
    format!("\"{}\"", text.replace('\\', "\\\\").replace('"', "\\\""))
}
