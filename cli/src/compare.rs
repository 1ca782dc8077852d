//! Two reports of `calomel bench`, side by side.

use std::fmt::Write;

use crate::bench::{Report, Row};
use crate::units;

/// A line for each row that both have, and the names of the others.
pub(crate) fn table(before: &Report, after: &Report) -> String {
    let mut text = format!("{:<7} {:<28} {:>9} {:>9} {:>7}\n", "", "medians", "before", "after", "ratio");
    let find = |report: &Report, row: &Row| report.rows.iter().find(|other| other.key() == row.key()).cloned();
    for row in &after.rows {
        let Some(old) = find(before, row) else { continue };
        let [was, is] = [old.times.median, row.times.median].map(|ns| ns as f64);
        let ratio = is / was.max(1.0);
        // Writing to a string can't fail.
        let (label, was, is) = (row.label(), units::time(was), units::time(is));
        let _ = writeln!(text, "{:<7} {label:<28} {was:>9} {is:>9} {ratio:>7.2}", row.transport);
    }
    for (report, other, name) in [(before, after, "before"), (after, before, "after")] {
        for row in report.rows.iter().filter(|row| find(other, row).is_none()) {
            let _ = writeln!(text, "{:<7} {:<28} only {name}", row.transport, row.label());
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use crate::bench::{FORMAT, What};
    use crate::histogram::Percentiles;

    use super::*;

    fn report(rows: &[(What, usize, u64)]) -> Report {
        let row = |&(what, size, median): &(What, usize, u64)| Row {
            transport: "tcp".to_owned(),
            what,
            size,
            in_flight: 1,
            times: Percentiles { median, ..Percentiles::default() },
        };
        Report {
            version: FORMAT,
            calomel: String::new(),
            kernel: String::new(),
            processors: 1,
            rows: rows.iter().map(row).collect(),
        }
    }

    #[test]
    fn rows_of_both_have_a_ratio_and_others_are_named() {
        let before = report(&[(What::Call, 0, 1_000), (What::Pull, 4096, 5_000)]);
        let after = report(&[(What::Call, 0, 1_500), (What::Push, 4096, 5_000)]);
        let table = table(&before, &after);
        let lines: Vec<Vec<&str>> = table.lines().skip(1).map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(lines[0], ["tcp", "empty", "call", "1.00", "us", "1.50", "us", "1.50"]);
        assert_eq!(lines[1].join(" "), "tcp call + pull of 4 KiB only before");
        assert_eq!(lines[2].join(" "), "tcp call + push of 4 KiB only after");
        assert_eq!(lines.len(), 3);
    }
}
