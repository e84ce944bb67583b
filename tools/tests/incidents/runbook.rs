//! The table of incidents in docs/runbook.md, against the instruments.

const RUNBOOK: &str = include_str!("../../../docs/runbook.md");

/// What a row names in its first column.
struct Row<'a> {
    /// The exit code of the check.
    code: i32,
    words: Vec<&'a str>,
    cause: &'a str,
}

fn rows() -> Vec<Row<'static>> {
    let (_, table) = RUNBOOK.split_once("| what you see | the cause |").unwrap();
    let lines = table
        .lines()
        .skip(2)
        .take_while(|line| line.starts_with('|'));
    lines
        .map(|line| {
            let columns: Vec<&str> = line.split('|').map(str::trim).collect();
            let (code, _) = columns[1].split_once(',').unwrap();
            Row {
                code: code.parse().unwrap(),
                words: columns[1].split('`').skip(1).step_by(2).collect(),
                cause: columns[2],
            }
        })
        .collect()
}

/// Tests that one row alone fits the output of the check, with the owner's log where the check
/// finds the store in service.
#[track_caller]
pub fn tells(code: i32, checked: &str, log: &str) {
    let seen = match code {
        0 => format!("{checked}{log}"),
        _ => checked.to_owned(),
    };
    let fits = |row: &Row<'_>| row.code == code && row.words.iter().all(|word| seen.contains(word));
    let rows: Vec<&str> = rows()
        .iter()
        .filter(|row| fits(row))
        .map(|row| row.cause)
        .collect();
    assert_eq!(rows.len(), 1, "{rows:?} for {checked}");
    println!("the runbook: {}", rows[0]);
}
