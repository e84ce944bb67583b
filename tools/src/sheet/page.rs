//! Facts as HTML: one file, without scripts, for light and dark screens and for paper.

use std::fmt::Write as _;

use crate::shown::shown;

/// A page.
#[derive(Default)]
pub struct Page {
    pub title: String,
    /// Labels and values.
    pub facts: Vec<(&'static str, String)>,
    /// Questions and answers.
    pub answers: Vec<(&'static str, String)>,
    pub sections: Vec<Section>,
}

/// A part of a page.
#[derive(Default)]
pub struct Section {
    pub heading: String,
    pub text: Vec<String>,
    /// Charts as SVG, with what they show.
    pub charts: Vec<(String, String)>,
    pub tables: Vec<Table>,
    /// Words and their meanings.
    pub terms: Vec<(&'static str, String)>,
}

/// A table: its first column is names.
pub struct Table {
    headings: Vec<String>,
    rows: Vec<Vec<String>>,
}

const STYLE: &str = include_str!("page.css");

/// Text that is no markup, on one line.
fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for letter in shown(text).chars() {
        match letter {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            letter => out.push(letter),
        }
    }
    out
}

impl Page {
    /// The file.
    pub fn html(&self) -> String {
        let title = escaped(&self.title);
        let mut html = format!(
            "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
             <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
             <meta name=\"color-scheme\" content=\"light dark\">\n\
             <title>{title}</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n\
             <h1><bdi>{title}</bdi></h1>\n"
        );
        // Writing to a string does not fail.
        let _ = self.write(&mut html);
        html.push_str("</body>\n</html>\n");
        html
    }

    fn write(&self, html: &mut String) -> std::fmt::Result {
        list(html, "facts", &self.facts)?;
        if !self.answers.is_empty() {
            writeln!(html, "<section class=\"answers\">")?;
            list(html, "answers", &self.answers)?;
            writeln!(html, "</section>")?;
        }
        for section in &self.sections {
            section.write(html)?;
        }
        Ok(())
    }
}

fn list(html: &mut String, class: &str, rows: &[(&str, String)]) -> std::fmt::Result {
    writeln!(html, "<dl class=\"{class}\">")?;
    for (label, value) in rows {
        let (label, value) = (escaped(label), escaped(value));
        writeln!(html, "<dt>{label}</dt><dd><bdi>{value}</bdi></dd>")?;
    }
    writeln!(html, "</dl>")
}

impl Section {
    pub fn new(heading: &str) -> Section {
        Section {
            heading: heading.to_owned(),
            ..Section::default()
        }
    }

    fn write(&self, html: &mut String) -> std::fmt::Result {
        writeln!(html, "<section>\n<h2>{}</h2>", escaped(&self.heading))?;
        for text in &self.text {
            writeln!(html, "<p><bdi>{}</bdi></p>", escaped(text))?;
        }
        for (svg, about) in &self.charts {
            let about = escaped(about);
            let svg = svg.replacen(
                "<svg ",
                &format!("<svg role=\"img\" aria-label=\"{about}\" "),
                1,
            );
            writeln!(
                html,
                "<figure>\n{svg}<figcaption>{about}</figcaption>\n</figure>"
            )?;
        }
        for table in &self.tables {
            table.write(html)?;
        }
        if !self.terms.is_empty() {
            list(html, "facts", &self.terms)?;
        }
        writeln!(html, "</section>")
    }
}

impl Table {
    pub fn new(headings: &[&str], rows: Vec<Vec<String>>) -> Table {
        Table {
            headings: headings.iter().map(|of| (*of).to_owned()).collect(),
            rows,
        }
    }

    fn write(&self, html: &mut String) -> std::fmt::Result {
        writeln!(html, "<div class=\"table\"><table>\n<thead><tr>")?;
        for heading in &self.headings {
            writeln!(html, "<th scope=\"col\">{}</th>", escaped(heading))?;
        }
        writeln!(html, "</tr></thead>\n<tbody>")?;
        for row in &self.rows {
            write!(html, "<tr>")?;
            for (at, cell) in row.iter().enumerate() {
                let cell = escaped(cell);
                match at {
                    0 => write!(html, "<th scope=\"row\"><bdi>{cell}</bdi></th>")?,
                    _ => write!(html, "<td><bdi>{cell}</bdi></td>")?,
                }
            }
            writeln!(html, "</tr>")?;
        }
        writeln!(html, "</tbody></table></div>")
    }
}
