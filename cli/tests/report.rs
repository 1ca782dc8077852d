//! The report of `calomel bench --html` in a browser: what a person sees.

mod support;

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::BufReader;
use std::path::Path;
use std::process::{Command, Stdio};

use support::{finish, json, run};

/// Writes into the page which texts of a plot overlap, or leave it.
const LOOK: &str = r#"<script>
const found = [];
for (const svg of document.querySelectorAll("svg")) {
    const box = svg.getBoundingClientRect();
    const texts = [...svg.querySelectorAll("text")].map((text) => [text.textContent, text.getBoundingClientRect()]);
    texts.forEach(([name, one], index) => {
        if (one.left < box.left || one.right > box.right || one.top < box.top || one.bottom > box.bottom) found.push(name + " is outside");
        for (const [other, two] of texts.slice(index + 1)) {
            const apart = one.right <= two.left || two.right <= one.left || one.bottom <= two.top || two.bottom <= one.top;
            if (!apart) found.push(name + " overlaps " + other);
        }
    });
}
document.title = "looked at " + document.querySelectorAll("svg text").length + " texts";
document.body.insertAdjacentHTML("beforeend", "<p id=found>" + found.join("; ") + "</p>");
</script>"#;

/// The name of the browser, where there is one.
fn browser() -> Option<&'static str> {
    let answers = |name: &&str| {
        let mut version = Command::new(name);
        version.arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok_and(|status| status.success())
    };
    ["chromium", "chromium-browser", "google-chrome"].into_iter().find(answers)
}

/// Opens a page, and returns what the browser prints.
fn open(browser: &str, folder: &Path, page: &Path, arguments: &[&str]) -> String {
    let mut command = Command::new(browser);
    command.args(["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1100,1500"]);
    // It finds nothing, and leaves nothing, in the home of the user.
    command.arg(format!("--user-data-dir={}", folder.join("profile").display())).env("HOME", folder).stdin(Stdio::null());
    command.args(arguments).arg(format!("file://{}", page.display()));
    let (code, text, error) = finish(command);
    assert_eq!(code, 0, "{error}");
    text
}

/// The cells of the table's rows, without the head.
fn cells(dom: &str) -> Vec<Vec<String>> {
    let rows = dom.split("<tr>").skip(2).map(|row| row.split("</tr>").next().unwrap());
    rows.map(|row| row.split("<td>").skip(1).map(|cell| cell.split('<').next().unwrap().to_owned()).collect()).collect()
}

/// The nanoseconds of a text such as `12.3 us`.
fn nanoseconds(text: &str) -> f64 {
    let (number, unit) = text.split_once(' ').unwrap();
    let factor = HashMap::from([("ns", 1.0), ("us", 1e3), ("ms", 1e6), ("s", 1e9)])[unit];
    number.parse::<f64>().unwrap() * factor
}

/// The picture's size, and how many pixels have each colour.
fn colours(path: &Path) -> (u32, u32, HashMap<[u8; 3], usize>) {
    let mut reader = png::Decoder::new(BufReader::new(File::open(path).unwrap())).read_info().unwrap();
    let mut pixels = vec![0; reader.output_buffer_size().unwrap()];
    let info = reader.next_frame(&mut pixels).unwrap();
    let mut counts = HashMap::new();
    for pixel in pixels[..info.buffer_size()].chunks_exact(info.color_type.samples()) {
        *counts.entry([pixel[0], pixel[1], pixel[2]]).or_insert(0) += 1;
    }
    (info.width, info.height, counts)
}

#[test]
fn the_report_can_be_read_in_a_browser() {
    let Some(browser) = browser() else {
        // Not `eprintln!`, which the harness would hide.
        std::io::Write::write_all(&mut std::io::stderr(), b"the report in a browser: SKIPPED, there is no chromium\n").unwrap();
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str| folder.path().join(name);
    let (figures, page, picture) = (file("figures.json"), file("report.html"), file("report.png"));
    let [json_name, html_name] = [&figures, &page].map(|path| path.to_str().unwrap());
    // Sizes far apart, which make many labels.
    let sizes =
        ["bench", "--time", "5ms", "--sizes", "1,4KiB,1MiB,64MiB", "--in-flight", "4", "--json", json_name, "--html", html_name];
    let (code, _, error) = run(&sizes);
    assert_eq!((code, error.as_str()), (0, ""));
    let report = json(&fs::read_to_string(&figures).unwrap());
    let rows = report["rows"].as_array().unwrap();

    // What it looks like.
    open(browser, folder.path(), &page, &[&format!("--screenshot={}", picture.display())]);
    let (width, height, colours) = colours(&picture);
    assert_eq!((width, height), (1100, 1500));
    let of = |colour: [u8; 3]| colours.get(&colour).copied().unwrap_or(0);
    let paper = of([255, 255, 255]);
    assert!(paper > 1_000_000 && paper < 1_640_000, "{paper} white pixels");
    // The lines of tcp and of shm, in four plots of some hundred pixels each.
    for colour in [[0x00, 0x72, 0xb2], [0xd5, 0x5e, 0x00]] {
        assert!(of(colour) > 600, "{} pixels of {colour:?}", of(colour));
    }
    assert!(colours.len() > 50, "{} colours", colours.len());

    // What it says, after a script of the test has looked at it.
    let text = fs::read_to_string(&page).unwrap();
    let looked_at = file("looked-at.html");
    fs::write(&looked_at, text.replace("</body>", &(LOOK.to_owned() + "</body>"))).unwrap();
    let dom = open(browser, folder.path(), &looked_at, &["--dump-dom"]);
    assert_eq!(dom.matches("<svg").count(), 4);
    let texts: usize = dom.split("<title>looked at ").nth(1).unwrap().split(' ').next().unwrap().parse().unwrap();
    assert!(texts > 40, "{texts} texts in the plots");
    let found = dom.split("<p id=\"found\">").nth(1).unwrap().split("</p>").next().unwrap();
    assert_eq!(found, "", "texts of the plots");
    // A point for each figure but those of empty calls, twice for the arguments.
    let points = |what: &str| rows.iter().filter(|row| row["what"] == what).count();
    assert_eq!(dom.matches("<circle").count(), 2 * points("arguments") + points("pull") + points("push"));
    // The figures of the table are those of the file.
    let cells = cells(&dom);
    assert_eq!(cells.len(), rows.len());
    for (cells, row) in cells.iter().zip(rows) {
        assert_eq!(cells[0], row["transport"].as_str().unwrap());
        for (cell, name) in cells[2..7].iter().zip(["min", "median", "p90", "p99", "max"]) {
            let exact = row["times"][name].as_f64().unwrap();
            assert!((nanoseconds(cell) / exact - 1.0).abs() < 0.006, "{name}: {cell} for {exact} ns");
        }
    }
}
